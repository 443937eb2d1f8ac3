"""Names for content: the same content has the same name on every machine and in every Python."""

from __future__ import annotations

import hashlib
import json


def digest(obj: object) -> str:
    """SHA-256 (64 hex) of `obj` as canonical JSON: sorted keys, no spaces, tuples as lists."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def device_name(environment: dict, device: str = "cpu") -> str:
    """The name of what computes: the GPUs' model for device "cuda", else the CPU's."""
    if device == "cuda":
        return " + ".join(sorted({gpu["name"] for gpu in environment["gpus"]}))
    return environment["cpu"]


def reuse_key(case_key: str, source: str, environment: dict, device: str = "cpu") -> str:
    """Two measurements with this key (16 hex digits) may stand for each other.

    The case, the code that runs it, the libraries below and the chip: nothing else. The folder, the
    date, the size of the world that hosted the case and unrelated cases beside it do not matter.
    """
    versions = {name: environment[name] for name in ("torch", "triton", "nccl")}
    name = device_name(environment, device)
    parts = {"case": case_key, "source": source, "versions": versions, "device": name}
    return digest(parts)[:16]
