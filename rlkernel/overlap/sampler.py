"""A GPU's hardware counters over time, by CUPTI's PM sampling, in a process of its own.

    python -m rlkernel.overlap.sampler DEVICE INTERVAL_NS

The chip counts for itself and is asked at a fixed interval: whatever any process runs there is seen
side by side as it runs, and no kernel waits for another one, as kernels do under a profiler that
replays them. A process of its own, since torch brings a CUPTI of another version, and one process
can hold only one.

A word on stdin, a line of JSON on stdout: "start" -> {}; "stop" -> {"ns": ends of the intervals,
name of METRICS: its value in each}; {"error": what went wrong} in the place of either.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import sys
from pathlib import Path

# What it is called here -> CUPTI's name on Hopper. All of them fit into one pass.
METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "l2": "lts__t_bytes.sum",  # everything that L2's slices were asked for
    "sm_cycles": "sm__cycles_active.avg",  # with a warp on it, mean of the SMs
    "tensor_cycles": "sm__pipe_tensor_cycles_active.avg",
    "cycles": "gpc__cycles_elapsed.max",
}
MOST = 1 << 16  # intervals of one window


def serve(device: int, interval_ns: int) -> None:
    """Answer until stdin ends."""
    collector = _collector(device)
    try:
        collector.configure(metrics=list(METRICS.values()), sampling_interval=interval_ns)
        print("{}", flush=True)  # ready
        for line in sys.stdin:
            if line.strip() == "start":
                collector.start()
                print("{}", flush=True)
            else:
                collector.stop()
                print(json.dumps(_decoded(collector)), flush=True)
    finally:
        collector.disable()


def _collector(device: int):
    """Enabled. Of the CUPTIs on the path it must be the first, whole: another one's parts crash."""
    folder = Path(list(importlib.import_module("nvidia.cu13").__path__)[0], "lib")
    for name in ("libnvperf_host.so", "libnvperf_target.so", "libcupti.so.13"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    from cuda.bindings import driver
    from cupti import pm_sampling

    driver.cuInit(0)
    collector = pm_sampling.Collector(device)
    collector.enable()
    return collector


def _decoded(collector) -> dict[str, list]:
    found = collector.decode(MOST)
    samples = list(found)
    if len(samples) == MOST:
        raise RuntimeError(f"a window of more than {MOST} intervals: take a longer interval")
    values = {name: [s.metric_values[n] for s in samples] for n, name in enumerate(METRICS)}
    return {"ns": [s.end_timestamp for s in samples], **values}


if __name__ == "__main__":
    faulthandler.enable()
    try:
        serve(int(sys.argv[1]), int(sys.argv[2]))
    except Exception as error:  # whoever asked reads it
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        sys.exit(1)
