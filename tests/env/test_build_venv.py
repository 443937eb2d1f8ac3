"""When is .venv built anew, for which target, and what does a set-up that fails leave behind?"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "env" / "build_venv.py"
HERE = "%d.%d" % sys.version_info[:2]  # noqa: UP031


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("build_venv", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path, tool):
    """A root with one pin, and a .venv that is exactly that (its python is this one)."""
    env, venv = tmp_path / "env", tmp_path / ".venv"
    env.mkdir()
    shutil.copy(SCRIPT, env)
    (env / "constraints.txt").write_text("idna==3.20\n")
    (tmp_path / "requirements.txt").write_text("-c env/constraints.txt\nPy_Torch==1.2\n")
    for target in tool.TARGETS:
        (env / f"requirements-{target}.txt").write_text("-r ../requirements.txt\n")
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    info = venv / "lib" / f"python{HERE}" / "site-packages" / "py_torch-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Py.Torch\nVersion: 1.2+cpu\n")
    stamp = {"fingerprint": tool.fingerprint(tmp_path, "cpu"), "target": "cpu"}
    (venv / "ready.json").write_text(json.dumps(stamp | {"root": str(tmp_path), "python": HERE}))
    return tmp_path


def restamp(tree: Path, **fields: str) -> None:
    path = tree / ".venv" / "ready.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_ready_means_nothing_to_do(tool, tree):
    assert tool.fault(tree / ".venv", "cpu", tree) is None


@pytest.mark.parametrize(
    "harm, says",
    [
        (lambda root: shutil.rmtree(root / ".venv"), "there is none yet"),
        (lambda root: (root / ".venv" / "ready.json").unlink(), "never finished"),
        (lambda root: (root / ".venv" / "ready.json").write_text("{"), "unreadable"),
        (lambda root: restamp(root, target="cuda"), "built for cuda, not for cpu"),
        (lambda root: (root / "requirements.txt").write_text("six==1.0\n"), "have changed"),
        (lambda root: (root / "env" / "constraints.txt").write_text(""), "have changed"),
        (lambda root: restamp(root, root="/elsewhere"), "has moved"),
        (lambda root: restamp(root, python="3.9"), "with Python 3.9"),
        (lambda root: (root / ".venv" / "bin" / "python").unlink(), "does not start"),
        (lambda root: shutil.rmtree(root / ".venv" / "lib"), "another version: py-torch"),
    ],
)
def test_whatever_is_wrong_is_named(tool, tree, harm, says):
    harm(tree)
    assert says in tool.fault(tree / ".venv", "cpu", tree)


def test_markers_choose_one_pin_of_two(tool, tree):
    (tree / "requirements.txt").write_text(
        'numpy==2.4.6; python_version >= "3.11"\nnumpy==2.2.6; python_version < "3.11"\n'
        'triton==3.7.1; platform_system == "Plan9"\n'
    )
    expected = "2.4.6" if sys.version_info >= (3, 11) else "2.2.6"
    assert tool.pins(tree, "cpu") == {"numpy": expected}
    with pytest.raises(SystemExit, match="sys_platform"):
        tool.applies('sys_platform == "linux"')


@pytest.mark.parametrize(
    "name, text, code, target",
    [
        ("nvidia-smi", "GPU 0: NVIDIA H200 (UUID: GPU-1)", 0, "cuda"),
        ("nvidia-smi", "couldn't communicate with the driver", 9, "cpu"),
        ("rocm-smi", "GPU[0] : Device Name: MI300X", 0, "rocm"),
        ("rocm-smi", "", 0, "cpu"),
        ("other", "GPU 0", 0, "cpu"),
    ],
)
def test_target_is_what_the_machine_lists(tool, tmp_path, monkeypatch, name, text, code, target):
    fake = tmp_path / name
    fake.write_text(f'#!/bin/sh\necho "{text}"\nexit {code}\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.detect() == target


def test_target_is_remembered(tool, tree):
    """`make setup TARGET=cuda` once; a later `make report` does not turn it back."""
    assert tool.last_target(tree / ".venv") == "cpu"
    restamp(tree, target="rocm")
    assert tool.last_target(tree / ".venv") == "rocm"
    (tree / ".venv" / "ready.json").unlink()
    assert tool.last_target(tree / ".venv") == ""


def test_a_set_up_that_fails_leaves_no_stamp(tree):
    """pip finds nothing: said in one line, exit code not 0, and the next call starts anew."""
    (tree / "requirements.txt").write_text("no-such-package-here==1\n")
    done = subprocess.run(
        [sys.executable, str(tree / "env" / "build_venv.py"), "--target", "cpu"],
        env=os.environ | {"PIP_NO_INDEX": "1"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("setup failed: pip could not install")
    assert not (tree / ".venv" / "ready.json").exists()


def test_two_at_a_time_wait_for_each_other(tree):
    script = tree / "env" / "build_venv.py"
    with open(script) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        second = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
        assert second.stdout.readline().startswith("another set-up of this tree is at work")
        assert second.poll() is None
    assert second.communicate(timeout=30) == ("", None) and second.returncode == 0


def test_a_python_out_of_range_is_refused_by_name():
    for version in ("(3, 9, 18, 'final', 0)", "(3, 14, 0, 'final', 0)"):
        code = f"import sys; sys.version_info = {version}; exec(open({str(SCRIPT)!r}).read())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1 and "PYTHON=python3.12" in done.stderr, done.stderr


def test_an_unknown_target_is_bad_usage():
    command = [sys.executable, str(SCRIPT), "--target", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "TARGET=tpu is none of cpu, cuda, rocm" in done.stderr


def test_the_door_to_preflight_is_short(root):
    text = (root / "env" / "preflight.py").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith(('"""', "import"))]
    assert len(lines) <= 5 and '"preflight"' in text
