"""The plugin entry: what it names, what happens to one that delegates, is wrong or is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rlkernel import plugin
from rlkernel.collectives.groups import alone
from rlkernel.experiments import a2a_ffn
from rlkernel.experiments.case import UsageError
from rlkernel.overlap import checks, measure, schedules
from tests.overlap import plugins
from tests.overlap.foreign import ForeignFFN
from tests.overlap.inputs import differing, drawn, layer, trained


def row(monkeypatch, name, **given):
    """What one rank says of `--overlap kernel` under the named plugin."""
    monkeypatch.setenv(schedules.VARIABLE, name)
    monkeypatch.setattr(a2a_ffn, "_plugin", lambda: {"plugin": name})
    asked = {"overlap": ("kernel",), "batch_size": 3, "tokens": 8, "dim": 16, "k": 2, "nproc": (1,)}
    asked |= {"num_tests": 0, "compile": False, "dtype": "fp32"}
    (case,) = a2a_ffn.cases(a2a_ffn.Params(**{**asked, **given}))
    return measure.row(case, alone())


def failed(result):
    return [name for name, held, _, _ in result["checks"] if not held]


def test_ours_is_the_default(monkeypatch):
    monkeypatch.delenv(schedules.VARIABLE, raising=False)
    assert schedules.plugin() is plugin.forward_ffn
    result = row(monkeypatch, schedules.DEFAULT, backward=True, check_correctness="bitwise")
    assert result["passed"], result["checks"]
    assert result["lines"][0]["rung"] == "chunks"


@pytest.mark.parametrize("name", [plugins.STARTER, plugins.RELABELLED])
def test_one_that_hands_over_is_no_fusion(monkeypatch, name):
    """The numbers are right; the claim is not."""
    result = row(monkeypatch, name)
    assert failed(result) == ["kernel/4: the plugin does not hand over"]
    value = next(v for n, held, v, _ in result["checks"] if not held)
    assert "no fusion" in value
    params = a2a_ffn.Params(overlap=("kernel",))
    at = {"batch": 3, "tokens": 8, "dim": 16, "k": 2, "backward": False, "block": True}
    case = {"parameters": at, "grid": {"dp": 1}, "dtype": "fp32", "fault": "none", "seed": 42}
    assert not a2a_ffn.verdict(params, [{"case": case, "result": result}])["passed"]


def test_a_wrong_one_fails_the_supplied_check(monkeypatch):
    result = row(monkeypatch, plugins.WRONG)
    assert failed(result) == ["kernel/4: forward", "kernel/4: whole batch"]


def test_one_of_somebody_elses_is_judged_by_its_values(monkeypatch):
    result = row(monkeypatch, plugins.OWN, block=False, backward=True)
    assert result["passed"], result["checks"]
    assert result["lines"][0]["path"] == "chunks: own, one by one"


@pytest.mark.parametrize("name", [plugins.SILENT, plugins.STRANGE])
def test_one_that_does_not_say_how_it_went_fails(monkeypatch, name):
    """Its numbers are right, and nobody can tell whether it is more than `none`."""
    result = row(monkeypatch, name, block=False)
    assert failed(result) == ["kernel/4: the rung is known"]
    assert result["lines"][0]["rung"] in ("unknown", "superb")


@pytest.mark.parametrize("block", [True, False])
def test_an_output_that_the_block_broadcasts_is_seen(monkeypatch, block):
    """Only shapes are looked at: one row instead of B becomes the block's [B, T, D]."""
    result = row(monkeypatch, plugins.NARROW, block=block, check_correctness="off")
    wanted = ["layer"] if block else ["block", "layer"]
    assert failed(result) == [f"kernel/4: shape of the {whose}'s output" for whose in wanted]


@pytest.mark.parametrize(
    "name, says", [("no.such.module", "cannot be imported"), (plugins.EMPTY, "no forward_ffn")]
)
def test_a_missing_one_is_named(monkeypatch, name, says):
    monkeypatch.setenv(schedules.VARIABLE, name)
    with pytest.raises(schedules.PluginError, match=says):
        layer(4, 16, 2)(drawn(0, 2, 4, 16), "kernel")


def test_one_that_cannot_be_found_is_bad_usage_before_a_launch(monkeypatch):
    for name in ("no_such_module", "rlkernel.no_such_module", "no.such.parent"):
        monkeypatch.setenv(schedules.VARIABLE, name)
        with pytest.raises(UsageError, match=f"{name} cannot be found"):
            a2a_ffn.cases(a2a_ffn.Params(overlap=("kernel",)))
    assert a2a_ffn.cases(a2a_ffn.Params(overlap=("with-sm",)))


BROKEN = {
    "no Python": ("def", "SyntaxError"),
    "an error of its own": ("1 / 0", "ZeroDivisionError: division by zero"),
    "an exit": ("import sys; sys.exit('not here')", "SystemExit: not here"),
}


@pytest.mark.parametrize("source, says", BROKEN.values(), ids=BROKEN)
def test_one_that_fails_as_it_is_imported_is_bad_usage(monkeypatch, tmp_path, source, says):
    """As a module the ranks refuse it; as a package around the module it never gets that far."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text(source)
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text(source)
    (tmp_path / "broken_package" / "plugin.py").touch()
    asked = a2a_ffn.Params(
        overlap=("kernel",), nproc=(1,), batch_size=1, tokens=2, dim=4, k=2, compile=False
    )
    monkeypatch.setenv(schedules.VARIABLE, "broken_module")
    (case,) = a2a_ffn.cases(asked)
    with pytest.raises(UsageError, match=f"broken_module cannot be imported: {says}"):
        a2a_ffn.run(case, alone())
    monkeypatch.setenv(schedules.VARIABLE, "broken_package.plugin")
    with pytest.raises(UsageError, match=f"broken_package.plugin .*broken_package raised {says}"):
        a2a_ffn.cases(asked)


def test_another_plugin_is_another_case(monkeypatch):
    keys = set()
    for name in ("rlkernel.plugin", "tests.overlap.plugins"):
        monkeypatch.setenv(schedules.VARIABLE, name)
        (case,) = a2a_ffn.cases(a2a_ffn.Params(overlap=("kernel",)))
        assert case.parameters["plugin"] == name
        keys.add(case.key)
    assert len(keys) == 2


class Block(torch.nn.Module):
    """Somebody else's ffn, and the plugin as its `kernel`."""

    def __init__(self, ffn):
        super().__init__()
        self.ffn = ffn

    def forward(self, x, overlap):
        return self.ffn(x) if overlap == "none" else plugin.forward_ffn(self.ffn, x)


@pytest.mark.parametrize("by_token", [False, True], ids=["rows by source", "rows by token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_works_on_any_ffn_with_the_named_attributes(dtype, by_token):
    """In BF16 the norms' gradients of the other order are a percent away, with more rows more."""
    ffn = ForeignFFN(64, 16, 3, dtype=dtype, by_token=by_token)
    x, dy = drawn(0, 3, 64, 16, dtype=dtype), drawn(1, 3, 64, 16, dtype=dtype)
    before = x.clone()
    checks.check_forward(Block(ffn), x, "kernel")
    checks.check_backward(Block(ffn), x, "kernel", "approx", 42)
    got = trained(lambda x: plugin.forward_ffn(ffn, x), ffn, x, dy)
    assert not differing(got, trained(ffn, ffn, x, dy)) and torch.equal(x, before)


def test_weights_that_do_not_tell_the_order_are_asked_again():
    """All norms' gradients are zeros behind a wout of zeros."""
    ffn = ForeignFFN(64, 16, 3, dtype=torch.bfloat16, by_token=True, seed=1)
    x, dy, kept = *(drawn(n, 2, 64, 16, dtype=torch.bfloat16) for n in (0, 1)), ffn.wout.data
    for wout in (torch.zeros_like(kept), kept):
        ffn.wout.data = wout
        got = trained(lambda x: plugin.forward_ffn(ffn, x), ffn, x, dy)
        assert not differing(got, trained(ffn, ffn, x, dy))


def test_it_needs_neither_jupyter_nor_matplotlib(root):
    code = "import sys, rlkernel.plugin; print(sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert "torch" in done.stdout
    for name in ("matplotlib", "IPython", "ipykernel", "papermill", "nbconvert"):
        assert name not in done.stdout
