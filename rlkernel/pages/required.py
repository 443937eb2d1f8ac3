"""What the overlap question asks to be measured, and which published record answers each part.

A record that is missing is a gap in the report, with the command that fills it. One that is older
than the code, or whose times its own samples do not give, is refused: see `refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rlkernel import records
from rlkernel.pages import costs, evidence, raw
from rlkernel.records import Record
from rlkernel.records.publish import committed_root

EXPERIMENTS = ("a2a-ffn", "a2a-gemm", "counters", "exchange", "preflight")
REAL, ONE = "real nodes", "one host"  # real: as collectives/topology.py tells it from the boots
PARTIAL = "partial milestone: two real nodes NOT COVERED"
DEFAULT = {"batch": 512, "tokens": 64, "dim": 1280, "k": 6}
TWO_GPUS = "--device cuda --nproc 2"
SCHEDULES = "--overlap with-sm,sm-free,kernel --chunks 1,2,4,8 --protocol documented,hot"
LIKE = "--no-compile --other-none eager,compiled"  # like for like, and what is not, named so
CROSS = "NNODES=2 NPROC=1 NODE_RANK=0 MASTER_ADDR=NODE0_IP bash env/run_prod_cross.sh"


@dataclass(frozen=True)
class Need:
    """One part of what is asked for; command: what measures it, at the root of the tree."""

    name: str
    command: str
    fits: Callable[[Record], bool]

    def answers(self, found: Iterable[Record]) -> list[Record]:
        return [record for record in found if self.fits(record)]


def published() -> list[Record]:
    """Every published record of the question, by experiment and name."""
    home = committed_root()
    found = [r for name in EXPERIMENTS for r in records.find(name, home, published=True)]
    return sorted(filter(_ours, found), key=lambda r: (r.experiment, r.path.name))


def refused(found: Iterable[Record]) -> list[str]:
    """A sentence for each record that may not be handed in, with the command that replaces it."""
    said = []
    for record in found:
        where = f"{record.experiment}/{record.path.name}"
        again = (
            f"measure it anew, and publish that in place of results/published/{where}:\n"
            f"    {' '.join(record.run['argv'])}"
        )
        if evidence.is_stale(record):
            said.append(f"{where} is stale, the code has changed since; {again}")
        elif wrong := raw.apart(record):
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            said.append(f"{where} contradicts its raw samples: {wrong[0]}{more}; {again}")
    return said


def stands(record: Record) -> str:
    """Where its ranks stood: on one host, on real nodes, or on what stands for nodes."""
    told = [row["result"].get("topology") or {} for row in record.rows]
    kind = next((at["kind"] for at in told if at.get("kind")), "")
    return kind or (record.run.get("topology") or {}).get("agents") or ONE


def several_nodes(record: Record) -> bool:
    return not stands(record).startswith(("one host", "one agent"))


def milestone(found: Iterable[Record]) -> str:
    """The label of everything that is handed in; "" once a record of two hosts is there."""
    real = any(r.experiment == "a2a-ffn" and stands(r) == REAL for r in found)
    return "" if real else PARTIAL


def _ours(record: Record) -> bool:
    """A preflight belongs to the question where it made the public checks, which take GPUs."""
    what = record.run.get("parameters", {}).get("what")
    public = what in ("public", "all") and record.run.get("device") == "cuda"
    return record.status == "ok" and (record.experiment != "preflight" or public)


def _case(device: str, **wanted) -> Callable[[Record], bool]:
    """Whether a record of that device has a case with these parameters, on one host; `timed`: one
    with times."""
    timed = wanted.pop("timed", True)

    def fits(record: Record) -> bool:
        if record.experiment != "a2a-ffn" or record.run.get("device") != device:
            return False
        return not several_nodes(record) and any(_has(row, wanted, timed) for row in record.rows)

    return fits


def _has(row: Mapping, wanted: Mapping, timed: bool) -> bool:
    at = row["case"]["parameters"]
    same = all(at.get(name) == value for name, value in wanted.items())
    return same and (bool(row["result"].get("times")) or not timed)


def _nodes(device: str, ranks: int = 2, real: bool = False) -> Callable[[Record], bool]:
    def fits(record: Record) -> bool:
        most = max((row["case"]["grid"]["dp"] for row in record.rows), default=0)
        where = stands(record) == REAL if real else several_nodes(record)
        mine = record.experiment == "a2a-ffn" and record.run.get("device") == device
        return mine and where and most >= ranks

    return fits


def _matrix(record: Record) -> bool:
    asked = record.run.get("parameters", {}).get("matrix")
    return record.experiment == "a2a-ffn" and asked == "full" and record.run["device"] == "cuda"


PLAIN = {**DEFAULT, "comm_scale": 1, "compute_scale": 1, "comp_only": False}
FORWARD = Need(
    "the default workload, two GPUs, forward",
    f"python -m rlkernel a2a-ffn {TWO_GPUS} {SCHEDULES} {LIKE} --trace",
    _case("cuda", **PLAIN, backward=False),
)
BACKWARD = Need(
    "the default workload, two GPUs, forward and backward",
    f"python -m rlkernel a2a-ffn {TWO_GPUS} {SCHEDULES} {LIKE} --trace --backward",
    _case("cuda", **PLAIN, backward=True),
)
EMULATED = Need(
    "two emulated nodes with a GPU each (no replacement for real ones)",
    f"python -m rlkernel a2a-ffn --nodes 2 {TWO_GPUS} --overlap with-sm,kernel --trace "
    "--protocol documented,hot",
    lambda r: _nodes("cuda")(r) and stands(r) != REAL,
)
REAL_NODES = Need(
    "two real nodes", f"{CROSS} --overlap with-sm,kernel --trace", _nodes("cuda", real=True)
)
SIXTEEN = Need(
    "16 ranks under two agents, CPU",
    "python -m rlkernel a2a-ffn --nodes 2 --nproc 16 --device cpu --batch-size 2 --tokens 16 "
    "--dim 32 --k 2 --no-compile --overlap with-sm,kernel --backward --num-tests 0 --trace",
    _nodes("cpu", ranks=16),
)
NODES = (EMULATED, REAL_NODES, SIXTEEN)
NEEDS = (
    Need(
        "the public checks, two GPUs", "python env/public_check.py",
        lambda r: r.experiment == "preflight" and r.run.get("device") == "cuda",
    ),
    FORWARD,
    BACKWARD,
    Need(
        "compute alone (comp-only), two GPUs",
        f"python -m rlkernel a2a-ffn {TWO_GPUS} --overlap kernel --comp-only",
        _case("cuda", **DEFAULT, comp_only=True),
    ),
    Need(
        "bound by communication (comm-scale 2), two GPUs",
        f"python -m rlkernel a2a-ffn {TWO_GPUS} {SCHEDULES} --comm-scale 2",
        _case("cuda", **DEFAULT, comm_scale=2),
    ),
    Need(
        "bound by compute (compute-scale 2), two GPUs",
        f"python -m rlkernel a2a-ffn {TWO_GPUS} {SCHEDULES} --compute-scale 2",
        _case("cuda", **DEFAULT, compute_scale=2),
    ),
    Need(
        "the regression matrix, as far as two GPUs go",
        f"python -m rlkernel a2a-ffn {TWO_GPUS} --overlap kernel --matrix full --num-tests 0",
        _matrix,
    ),
    Need(
        "the default workload, eight GPUs of one node",
        "NPROC=8 bash env/run_prod_local.sh --overlap kernel --warmup 10 --num-tests 100",
        lambda r: _case("cuda", **PLAIN)(r) and max(x["case"]["grid"]["dp"] for x in r.rows) >= 8,
    ),
    *NODES,
    Need(
        "what an exchange costs by message size", "python -m rlkernel exchange --device cuda",
        lambda r: r.experiment == "exchange" and r.run.get("device") == "cuda",
    ),
    Need(
        "what the choices in the fused products cost, one GPU", "python -m rlkernel a2a-gemm",
        lambda r: r.experiment == "a2a-gemm" and r.run.get("device") == "cuda",
    ),
    Need(
        "what sharing the chip costs, by hardware counters, one GPU", "make counters",
        lambda r: r.experiment == "counters" and bool(costs.cycles(r)),
    ),
)  # fmt: skip
