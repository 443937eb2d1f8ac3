"""What a record says of a machine, and what it must not say."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from rlkernel.records import environment, label, machine

ROOT = Path(__file__).resolve().parents[2]


def test_no_torch_comes_along():
    code = (
        "import sys, rlkernel.records as r\n"
        "print(r.environment()['torch'], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    version, imported = out.split()
    import torch

    # A wheel's own label (+cu130) may be in the module and not in the package's metadata.
    assert torch.__version__.startswith(version) and imported == "False"


def test_it_tells_what_matters_and_nobody():
    here = environment()
    assert set(here) == {
        *("python", "platform", "machine", "cpu", "cores", "memory_gib"),
        *("torch", "triton", "numpy", "nccl", "gpus"),
    }
    assert here["cores"] == len(os.sched_getaffinity(0))
    assert re.fullmatch(r"\w+( \d+\.\d+)?", here["platform"]), "a kernel's build names its host"
    text = json.dumps(here)
    names = [f"{socket.gethostname()}", f"{getpass.getuser()}", f"{Path.home()}"]
    assert not [name for name in names if f'"{name}"' in text or f"/{name}" in text]


def test_a_caller_cannot_change_it_for_others():
    environment()["gpus"].append("mine")
    assert "mine" not in environment()["gpus"]


def test_labels():
    assert label({"gpus": [{"name": "NVIDIA H200"}] * 2}) == "2x NVIDIA H200"
    assert label({"gpus": [], "cores": 2, "machine": "x86_64"}) == "2-core x86-64 CPU"


def test_gpus_are_read_from_their_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 580.159'\necho 'Odd GPU, [N/A], 1.2'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine._gpus() == [
        {"name": "NVIDIA H200", "memory_mib": 143771, "driver": "580.159"},
        {"name": "Odd GPU", "memory_mib": None, "driver": "1.2"},
    ]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine._gpus() == []


def test_git_is_told_where_there_is_one(tmp_path):
    assert machine.git(tmp_path) is None
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    found = machine.git(tmp_path)
    assert len(found["commit"]) == 40 and found["dirty"] is False
    (tmp_path / "f").touch()
    subprocess.run(["git", "-C", str(tmp_path), "add", "f"], check=True)
    assert machine.git(tmp_path)["dirty"] is True
