"""README's numbers come from published records, and an edited one is found."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from rlkernel.pages import costs, evidence, readme
from tests.figures import counted, products
from tests.pages.test_show import record


@pytest.fixture
def tree(tmp_path):
    """A folder with a README and one published record, written once."""
    text = f"# A\n\nbefore\n\n{readme.BEGIN}\nstray\n{readme.END}\n\nafter\n"
    (tmp_path / "README.md").write_text(text)
    home = tmp_path / "results" / "published" / "tp-swiglu"
    record(home / "cpu", source=evidence.source("tp-swiglu"))
    assert readme.update(root=tmp_path) == 0
    return tmp_path


def edit(tree, old: str, new: str) -> None:
    path = tree / "README.md"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_writes_the_block_and_only_the_block(tree):
    text = (tree / "README.md").read_text()
    assert text.startswith("# A\n\nbefore\n\n") and text.endswith("\n\nafter\n")
    assert "stray" not in text and readme.STALE not in text
    line = next(x for x in text.splitlines() if "/cpu`" in x)
    assert line == (
        "| tp-swiglu | 1 of 2 | P=2: 1.5e-08 of 1e-07 | 2-core x86-64 CPU "
        "| `results/published/tp-swiglu/cpu` |"
    )
    assert (tree / readme.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_check_is_content_and_a_second_time_changes_nothing(tree):
    before = (tree / "README.md").read_text()
    assert readme.update(check=True, root=tree) == 0
    assert readme.update(root=tree) == 0 and (tree / "README.md").read_text() == before


@pytest.mark.parametrize(
    "old, new",
    [("1.5e-08", "1.4e-08"), ("| 1 of 2 |", "| 2 of 2 |"), ("2-core", "9-core"),
     ("/cpu`, 2-core", "/cpu`, 9-core")],
)  # fmt: skip
def test_an_edited_number_is_found(tree, old, new, capsys):
    edit(tree, old, new)
    assert readme.update(check=True, root=tree) == 1
    said = capsys.readouterr().err
    assert "-| tp-swiglu" in said or "-The picture" in said
    assert old in said and new in said


def test_a_missing_number_is_found(tree, capsys):
    home = tree / "results" / "published" / "tp-swiglu"
    record(home / "new")
    assert readme.update(check=True, root=tree) == 1
    assert "results/published/tp-swiglu/new" in capsys.readouterr().err
    assert readme.update(root=tree) == 0 and readme.update(check=True, root=tree) == 0


def test_a_missing_picture_is_found(tree, capsys):
    (tree / readme.PICTURE).unlink()
    assert readme.update(check=True, root=tree) == 1
    assert "missing: results/published/figures/tp_swiglu.png" in capsys.readouterr().err


def test_stale_is_marked_and_is_no_failure(tree, monkeypatch):
    monkeypatch.setattr(evidence, "source", lambda experiment: "1" * 64)
    assert readme.update(check=True, root=tree) == 0  # the mark is not there yet
    assert readme.update(root=tree) == 0
    text = (tree / "README.md").read_text()
    assert text.count(f"`results/published/tp-swiglu/cpu`{readme.STALE} |") == 1
    assert readme.update(check=True, root=tree) == 0


def test_without_a_block_nothing_is_written(tree):
    (tree / "README.md").write_text("# A\n")
    with pytest.raises(readme.ReadmeError, match="has no block"):
        readme.update(root=tree)
    assert (tree / "README.md").read_text() == "# A\n"


def test_this_readme_is_what_the_records_say(root):
    assert readme.update(check=True, root=root) == 0


def test_the_checks_of_a_record_are_one_line_with_the_closest(tree):
    home = tree / "results" / "published" / "tp-swiglu"
    checks = [
        {"name": f"P={p}: equivalent", "passed": p < 4, "value": f"dX {p}e-8", "limit": "1e-7",
         "excess": p / 10}
        for p in (1, 8, 2)
    ]  # fmt: skip
    caught = {"passed": True, "value": "x", "limit": "x"}
    checks += [{"name": f"P={p}: caught", **caught} for p in (1, 2)]
    record(home / "many", verdict={"passed": False, "checks": checks})
    assert readme.update(root=tree) == 0
    (line,) = [x for x in (tree / "README.md").read_text().splitlines() if "/many`" in x]
    assert line.startswith("| tp-swiglu | 4 of 5 | P=8: dX 8e-8 of 1e-7 |")


@pytest.mark.parametrize("fault, told", [
    ("swap-shards", "1 of 2: swap-shards was planted, and is seen"), ("none", "1 of 2"),
])  # fmt: skip
def test_a_planted_fault_is_told_from_a_failure(tree, fault, told):
    checks = [{"name": str(held), "passed": held, "value": "", "limit": ""} for held in (0, 1)]
    home = tree / "results" / "published" / "ws2" / "fault"
    record(home, verdict={"passed": False, "checks": checks}, parameters={"fault": fault})
    assert readme.update(root=tree) == 0
    (line,) = [x for x in (tree / "README.md").read_text().splitlines() if "/fault`" in x]
    assert line.split(" | ")[1] == told


def test_what_the_ffn_costs_is_read_from_a_timed_record(tree):
    """A row an M, the official layer's time first; and a record without times says nothing."""
    path = tree / "results" / "published" / "det-ffn" / "gpu"
    path.mkdir(parents=True)
    label = {
        "machine_label": "one GPU",
        "experiment": "det-ffn",
        "path": path,
        "run": {"parameters": {"graph": True}},
        "source": "",
    }
    timed = SimpleNamespace(rows=[products.ffn(8), products.ffn(1)], **label)
    (line,) = [x for x in products.ffn(8)["result"]["lines"] if x["contract"] == "chain"]
    text = costs.forward([timed])
    rows = [t for t in text if t.startswith(("| 1 |", "| 8 |"))]
    assert len(rows) == 2 and rows[0].startswith("| 1 |")
    assert f" {line['official_us']:.1f} " in rows[1] and f" {line['median_us']:.1f} " in rows[1]
    assert f" {line['ratios']['official']['median']:.3f} |" in rows[1]
    assert any("`results/published/det-ffn/gpu`" in t and "one GPU" in t for t in text)
    untimed = SimpleNamespace(rows=[products.ffn(8, timed=False)], **label)
    assert costs.timed([untimed]) is None and costs.timed([untimed, timed]) is timed


def test_steps_layouts_and_sums_are_told_by_their_own_records(root):
    """Of this repository: a row an M, a layout and M, a message."""
    found = evidence.published(root / "results")
    for make, first in ((costs.step, "| 1 |"), (costs.two_gpus, "| tp2 |"), (costs.sums, "| 16 |")):
        text = make(found)
        assert any(line.startswith(first) for line in text), make.__name__
        assert "From `results/published/" in text[-1]
        assert make([]) == []


def moved_by(record, transport: str, name: str, started: str, times: float):
    """A copy of a record, made up: another transport, later, every time and ratio so much more."""
    rows = json.loads(json.dumps(record.rows))
    for row in rows:
        row["case"]["parameters"]["transport"] = transport
        for line in row["result"]["lines"]:
            line["median_us"] *= times
            if "ratio" in line:
                line["ratio"]["median"] *= times
    asked = record.parameters | {"transport": transport}
    run = record.run | {"started": started, "parameters": asked}
    return dataclasses.replace(record, rows=rows, run=run, path=record.path.with_name(name))


def test_a_later_record_of_another_transport_stands_beside_the_first(root):
    found = evidence.published(root / "results")
    (ours,) = [r for r in found if r.path.name == "2xH200-time-symmetric"]
    theirs = moved_by(ours, "nccl", "over-nccl", "2999", 3)
    both = costs.two_gpus([ours, theirs])
    assert both == costs.two_gpus([ours]) + costs.two_gpus([theirs])
    told = [line for line in both if line.startswith("Sums by ")]
    assert ["symmetric memory" in told[0], "over-nccl" in told[0]] == [True, False]
    assert ["NCCL" in told[1], "/over-nccl`" in told[1]] == [True, True]
    newer = moved_by(ours, "symmetric", "newer", "2999", 2)
    assert costs.two_gpus([ours, theirs, newer]) == costs.two_gpus([newer, theirs])
    for one in (ours, newer):  # plain calls: the range of each M, from its rows
        told = costs.two_gpus([one])[-1]
        eager = [
            line["ratio"]["median"] for row in one.rows for line in row["result"]["lines"]
            if line["mode"] == "eager" and row["case"]["parameters"]["m"] == 32
        ]  # fmt: skip
        assert f"as plain calls {min(eager):.2f} to {max(eager):.2f} at M = 32" in told


def test_sums_are_those_of_symmetric_memory(root):
    found = evidence.published(root / "results")
    wires = [r for r in found if r.experiment == "wire"]
    (ours,) = [r for r in wires if any(row["result"].get("lines") for row in r.rows)]
    assert costs.sums([ours, moved_by(ours, "nccl", "over-nccl", "2999", 3)]) == costs.sums([ours])


def test_what_a_product_pays_is_read_from_counters(tmp_path):
    broken = record(tmp_path / "b", [counted.calibration()], experiment="counters")
    assert costs.beside([broken]) == []
    told = costs.beside([record(tmp_path / "a", counted.every(), experiment="counters"), broken])
    held = next(line for line in told if line.startswith("| gemm1 | 32 SMs held |"))
    assert held == (
        "| gemm1 | 32 SMs held | 1.430 | 1.260 | 87% | 1,362 | 1,500 | 1,000 | 11,000 |"
    )
    assert len([line for line in told if line.startswith("| gemm")]) == 8
    assert "(B, T, D, k) = (512, 64, 1280, 6) on P = 2" in told[-1] and "takes 1.005 of" in told[-1]
    failed = [row | {"passed": row["case"]["parameters"]["part"] != "sharing"}
              for row in counted.every()]  # fmt: skip
    assert costs.beside([record(tmp_path / "c", failed, experiment="counters")]) == []
