"""Do two fresh processes get one hash from one seed? Each is a Python of its own.

    python -m rlkernel.ffn.fresh '{"m": 32, ...}'  ->  {"tree8.bf16 dx separate": "0123...", ...}

A hash is that of one rank's layer: forward, training output, dX and all dW, as exactness.py has it;
a layout that gives the bits of one rank gives this hash too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import torch

from rlkernel.ffn import exactness

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
TIMEOUT_S = 240.0


def hash_row(case, device: torch.device) -> dict:
    """Every contract and way to sum dX: the hashes of fresh processes and of this one."""
    at = {n: case.parameters[n] for n in ("m", "hidden", "intermediate", "contracts", "dx")}
    asked = json.dumps({**at, "seed": case.seed, "device": str(device)})
    # Elsewhere in this process kernels may be interpreted; the layer's twins need no kernel.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "rlkernel.ffn.fresh", asked]
    how = {"env": env, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with contextlib.ExitStack() as running:
        started = [
            running.enter_context(subprocess.Popen(command, **how)) for _ in range(PROCESSES)
        ]
        for process in started:
            running.callback(process.kill)
        here = hashes(json.loads(asked))
        fresh = [_said(process) for process in started]
    return _row(here, fresh)


def hashes(at: Mapping) -> dict[str, str]:
    """Variant -> 16 hex digits of one rank's results."""
    device = torch.device(at["device"])
    key = (at["m"], at["hidden"], at["intermediate"], at["seed"], device)
    return {f"{contract} dx {dx}": exactness.single(*key, contract, dx)[1]
            for contract, dx in _variants(at)}  # fmt: skip


def _variants(at: Mapping) -> Iterator[tuple[str, str]]:
    yield from product(at["contracts"].split("+"), at["dx"].split("+"))


def _said(process: subprocess.Popen) -> dict[str, str]:
    out, errors = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise RuntimeError(f"a fresh process ended with {process.returncode}:\n{errors[-2000:]}")
    return json.loads(out)


def _row(here: Mapping[str, str], fresh: list[Mapping[str, str]]) -> dict:
    """mismatches and elements of a line are hashes here: those of fresh processes that differ."""
    lines = []
    for name, digest in here.items():
        contract, _, dx = name.partition(" dx ")
        wrong = sum(said[name] != digest for said in fresh)
        line = {"operator": f"dx {dx}", "contract": contract, "dx": dx, "digest": digest}
        line |= {"schedule": f"{len(fresh)} fresh processes", "first": ""}
        lines.append(line | {"mismatches": wrong, "elements": len(fresh)})
    same = sum(not line["mismatches"] for line in lines)
    value = f"{same} of {len(lines)} variants"
    return {
        "passed": same == len(lines),
        "checks": [["two fresh processes: one hash", same == len(lines), value, "all"]],
        "lines": lines,
        "digest": dict(here),
    }


if __name__ == "__main__":
    print(json.dumps(hashes(json.loads(sys.argv[1]))))
