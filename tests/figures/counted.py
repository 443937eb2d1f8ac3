"""Made-up rows of hardware counters: beside others, each kernel by itself, a call over time."""

from __future__ import annotations

import copy

BESIDE = {"alone": (1.0, 1.0, 0), "copies to and from the host": (1.01, 1.002, 0),
          "SMs held": (1.26, 1.43, 32), "SMs that copy": (1.31, 1.45, 32)}  # fmt: skip
SIZE = {"batch": 512, "tokens": 64, "dim": 1280, "k": 6, "ranks": 2}
KERNELS = ("gemm1, library", "gemm1, fused", "norm_gate forward")


def row(part: str, fault: str = "none", **result) -> dict:
    case = {"experiment": "counters", "fault": fault, "parameters": {"part": part, **SIZE}}
    result = {"passed": True, "checks": [], **result}
    return {"key": part, "case": case, "result": result, "passed": True}


def line(**more) -> dict:
    return {"dram_read": 1.5e9, "dram_written": 1e9, "l2": 1.1e10, "sm_cycles": 0.98,
            "tensor_cycles": 0.87, "mhz": 1362.0, **more}  # fmt: skip


def sharing() -> dict:
    lines = [
        line(gemm=gemm, beside=name, sms=sms, median_us=2000 * time, p10_us=1990 * time,
             p90_us=2010 * time, cycles_ratio=more * (cycles - 1) + 1, gb_per_s=446.0,
             ratio={"median": time, "p10": time - 0.01, "p90": time + 0.01})
        for gemm, more in (("gemm1", 1), ("gemm2", 2))
        for name, (time, cycles, sms) in BESIDE.items()
    ]  # fmt: skip
    for one in lines:
        if one["beside"] == "alone":
            del one["gb_per_s"]
    return row("sharing", lines=lines)


def calibration() -> dict:
    lines = [line(kernel="copy", us=500.0, read=1.5e9, written=1e9)]
    return row("calibration", lines=lines, sampling_costs=1.0048)


def kernels() -> dict:
    return row("kernels", lines=[line(kernel=name, us=1000.0, read=1.2e9, written=1e9)
                                 for name in KERNELS])  # fmt: skip


def timeline() -> dict:
    """Two idle intervals, ten busy ones, an idle one."""
    busy = [0.0, 0.0, *[0.99] * 10, 0.0]
    seen = {"us": [20.0 * n for n in range(13)], "mhz": [1400.0 + n for n in range(13)],
            "tensor_cycles": [0.9 * share for share in busy], "sm_cycles": busy,
            "dram_read": [800 * share for share in busy], "l2": [6000 * share for share in busy],
            "dram_written": [500 * share for share in busy]}  # fmt: skip
    return row("timeline", timeline={"none": seen, "fused, flags set": copy.deepcopy(seen)})


def every() -> list[dict]:
    return [calibration(), kernels(), sharing(), timeline()]
