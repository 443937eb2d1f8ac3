"""Rows of a2a-ffn as two GPUs would leave them, made up: plausible times, traces by hand."""

from __future__ import annotations

SPEED = {"with-sm": 1.04, "sm-free": 1.13, "kernel": 1.17}
COMM, WIRE, COMP = 860.0, 340.0, 3400.0
SERIAL = COMM + COMP


def ratio(median: float, width: float = 0.02) -> dict:
    around = {"median": median, "p10": median - width, "p90": median + width}
    return around | {"mean": median, "ci95": width / 2}


def term(us: float, ranks: int = 2) -> dict:
    """A time as the record holds it: the slowest rank of each round, and each rank."""
    spread = {"median_us": us, "mean_us": us, "min_us": 0.98 * us, "max_us": 1.1 * us}
    each = [{name: x * (1 - 0.01 * rank) for name, x in spread.items()} for rank in range(ranks)]
    return {"slowest": spread, "ranks": each, "seconds": {"mean": us / 1e6}}


def sequential(rank: int = 0) -> dict:
    """pack, exchange, product, element-wise, product, exchange: nothing beside anything."""
    bars, at = [], 0.0
    for stream, kind, us in (
        ("stream 7", "copy", 90), ("stream 9", "comm", 170), ("stream 7", "gemm", 1950),
        ("stream 7", "elementwise", 370), ("stream 7", "gemm", 870), ("stream 7", "copy", 90),
        ("stream 9", "comm", 170), ("stream 7", "copy", 90),
    ):  # fmt: skip
        bars.append([stream, kind, at, at + us])
        at += us
    return analysed(bars, rank)


def pipelined(count: int = 4, rank: int = 0, comm: str = "stream 9") -> dict:
    """The first of `count` exchanges is exposed, the others run beside products."""
    bars, at, part = [], 0.0, 1 / count
    for n in range(count):
        bars.append([comm, "comm", at + n * 400 * part, at + (n + 1) * 400 * part])
    at = 400 * part
    for kind, us in (("gemm", 2000), ("elementwise", 380), ("gemm", 900)):
        bars.append(["stream 7", kind, at, at + us])
        at += us
    bars.append([comm, "comm", at - 200, at + 100])
    return analysed(bars, rank)


def fused(rank: int = 0) -> dict:
    bars = [["stream 7", "fused", 0.0, 2080.0], ["stream 9", "comm", 0.0, 130.0],
            ["stream 7", "elementwise", 2080.0, 2450.0],
            ["stream 7", "fused", 2450.0, 3420.0]]  # fmt: skip
    why = "not visible in this trace: _a2a_gemm exchanges inside one kernel"
    none = dict.fromkeys(("comm_us", "overlap_us", "exposed_us", "hidden"))
    return {**analysed(bars, rank), **none, "why": why}


def analysed(bars: list[list], rank: int) -> dict:
    """What the analyser would say of bars whose kinds do not overlap themselves."""
    comm = [b for b in bars if b[1] == "comm"]
    both = sum(
        max(0.0, min(c[3], w[3]) - max(c[2], w[2]))
        for c in comm for w in bars if w[1] in ("gemm", "elementwise")
    )  # fmt: skip
    whole = sum(c[3] - c[2] for c in comm)
    kinds: dict[str, float] = {}
    for _, kind, start, end in bars:
        kinds[kind] = kinds.get(kind, 0) + end - start
    length = max(b[3] for b in bars)
    path = {k: us for k, us in kinds.items() if k != "comm"}
    return {
        "rank": rank, "repeats": 3, "span_us": length + rank, "comm_us": whole,
        "comp_us": kinds.get("gemm", 0) + kinds.get("elementwise", 0), "overlap_us": both,
        "exposed_us": whole - both, "hidden": both / whole if whole else None, "why": "",
        "kinds": kinds, "critical": path | {"comm": length - sum(path.values()), "idle": 6.0},
        "timeline": bars,
    }  # fmt: skip


def schedule(gain: float, size: float = 1.0, ranks: int = 2, exposed: bool = True) -> dict:
    """What was timed of an overlapped schedule; gain: T serial / T overlap, below 1 it loses."""
    estimate = (SERIAL - SERIAL / gain) / COMM
    found = {
        **term(size * SERIAL / gain, ranks), "ratio": ratio(gain), "hidden": ratio(estimate, 0.04),
        "ceiling": 1 + COMM / COMP, "tokens_per_s": 1e7 * gain, "tflops": 400.0 * gain,
    }  # fmt: skip
    more = {"exposed_us": {"median": 160.0, "p10": 150.0, "p90": 171.0}, "exposed": 160.0 / COMM}
    return found | (more if exposed else {})


def row(
    gains: dict[str, float] | None = None, *, backward=False, traced=True, timed=("documented",),
    ranks: int = 2, sharing=(), fault: str = "none", **parameters,
) -> dict:  # fmt: skip
    """One workload; gains: variant ("sm-free/4") -> T serial / T overlap."""
    gains = {f"{name}/4": gain for name, gain in SPEED.items()} if gains is None else gains
    size = 3.0 if backward else 1.0
    lines = [
        {"schedule": v.split("/")[0], "chunks": int(v.split("/")[1]), "variant": v,
         "path": f"chunks: {v}", "rung": "chunks"} for v in gains
    ]  # fmt: skip
    result = {"passed": True, "checks": [], "lines": lines, "none_path": "none: by process group"}
    terms = {"none": SERIAL, "comm": COMM, "wire": WIRE, "comp": COMP}
    if timed:
        result["times"] = {
            state: {
                "terms": {name: term(us * size * hot, ranks) for name, us in terms.items()},
                "none": {"tokens_per_s": 1e7, "tflops": 400.0},
                "schedules": {v: schedule(gain, size * hot, ranks) for v, gain in gains.items()},
            }
            for state, hot in ((state, 1.0 if state == "hot" else 0.9) for state in timed)
        }  # fmt: skip
    if traced:
        result["seen"] = {"none": [sequential(rank) for rank in range(ranks)]} | {
            line["variant"]: [
                fused(r) if line["schedule"] == "kernel" else pipelined(line["chunks"], r)
                for r in range(ranks)
            ]
            for line in lines
        }
    if sharing:
        result["sharing"] = list(sharing)
    given = {"batch": 512, "tokens": 64, "dim": 1280, "k": 6, "backward": backward, **parameters}
    case = {"experiment": "a2a-ffn", "grid": {"dp": ranks, "cp": 1, "tp": 1}, "dtype": "bf16",
            "seed": 42, "fault": fault, "parameters": given}  # fmt: skip
    key = f"{ranks}{backward}{fault}{'-'.join(gains)}{given['batch']}"
    return {"key": key, "case": case, "result": result, "passed": fault == "none"}


def beside() -> list[dict]:
    """A product alone and beside an exchange."""
    found = []
    for gemm, us in (("gemm1", 1993.0), ("gemm2", 860.0)):
        for name, slower, mhz in (("alone", 1.0, 1530), ("copy engine", 1.012, 1522),
                                  ("NCCL", 1.081, 1490)):  # fmt: skip
            moved = {"gb_per_s": 250.0, "sent_bytes": 500_000_000, "lasted": 1.0}
            found.append({"beside": name, "gemm": gemm, "median_us": us * slower,
                          "ratio": ratio(slower, 0.008), "sm_mhz": mhz, "power_w": 690.0,
                          **({} if name == "alone" else moved),
                          **({"sms": 16} if name == "NCCL" else {})})  # fmt: skip
    return found


def gpu() -> list[dict]:
    """A whole record of two GPUs: every schedule both ways, chunk counts, sharing."""
    counts = {1: 0.1, 2: 0.04, 4: 0.0, 8: 0.03, 16: 0.2}
    gains = {f"{s}/{n}": SPEED[s] - less for s in SPEED for n, less in counts.items()}
    states = ("documented", "hot")
    return [row(gains, timed=states, sharing=beside()), row(gains, timed=states, backward=True)]


def cpu() -> list[dict]:
    """Two gloo ranks: small, overlap loses; and a planted fault, which no figure may show."""
    small, gains = (
        {"batch": 4, "tokens": 16, "dim": 128, "k": 2},
        {"with-sm/2": 0.8, "kernel/2": 0.8},
    )
    return [
        row(gains, **small),
        row(gains, fault="swapped-slices", timed=(), traced=False, **small),
    ]


def whole(gains: dict[str, float] | None = None, *, seed: int = 42, peak=None, **more) -> dict:
    """A row of two GPUs that a bar may be read from: hot, `kernel` fused, every schedule's peak,
    none under other settings, the inside of the kernels. peak: over none, by schedule."""
    like = {"comm_scale": 1, "compute_scale": 1, "comp_only": False, "compile": False,
            "block": True, "elementwise": "norm-gate", "chunks": "4"}  # fmt: skip
    found = row(gains, timed=more.pop("timed", ("documented", "hot")), **{**like, **more})
    result = found["result"]
    for line in result["lines"]:
        if line["schedule"] == "kernel":
            line |= {"rung": "fused", "path": f"fused: {line['variant']}"}
    result["device"], result["topology"] = "cuda", {"nodes": 1, "gpus": 2}
    result["checks"] = [[f"{line['variant']}: whole batch", True, "holds", "torch.equal"]
                        for line in result["lines"]]  # fmt: skip
    peak = {"with-sm": 1.01, "sm-free": 1.04, "kernel": 1.05} if peak is None else peak
    result["memory"] = {name: [int(7e9 * over), int(7.1e9 * over)]
                        for name, over in {"none": 1.0, **peak}.items()}  # fmt: skip
    for times in result.get("times", {}).values():
        lines = times["schedules"].items()
        times["others"] = {
            how: {**term(us), "ratio": {v: ratio(us / line["slowest"]["median_us"])
                                        for v, line in lines}}
            for how, us in (("eager", 8360.0), ("compiled", 5400.0))
        }  # fmt: skip
    hidden = [{"rank": rank, "hidden": 0.97 - 0.1 * rank} for rank in range(2)]
    result["inside"] = {"variant": "kernel/4", "ranks": hidden}
    found["case"]["seed"] = seed
    at = found["case"]["parameters"]
    found["key"] += f"-{seed}-{at['tokens']}-{at['dim']}-{at['k']}"
    return found
