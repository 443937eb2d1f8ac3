"""TP=2 x CP=2 on two nodes: does each boundary of the FFN's GEMMs hold, before and behind its sum?

                     TP0        TP1
    CP0 / node 0     rank 0     rank 1      TP groups [0,1] [2,3]: sums over features, inside a node
    CP1 / node 1     rank 2     rank 3      CP groups [0,2] [1,3]: sums over tokens, between nodes

Two torchrun agents stand for the two nodes on a machine that is alone; on several machines the same
command runs on each of them, with NNODES, NODE_RANK and MASTER_ADDR. The record says which it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlkernel.experiments import ws2_coverage, ws2_faults, ws2_products
from rlkernel.experiments.case import Case, UsageError, check_seeds, param
from rlkernel.grid import Grid

NAME = "ws2"
SUMMARY = "TP=2 x CP=2 on two nodes: every boundary of the FFN's GEMMs, before and behind its sum"
QUESTION = "Is every sum between ranks right, bit for bit, on two nodes with two ranks each?"
NODES = 2

HOME = Grid(cp=2, tp=2)
SIZES = {
    "small": {"hidden": 64, "intermediate": 128, "m": (1, 16)},
    "qwen3": {"hidden": 4096, "intermediate": 12288, "m": (1, 16, 128, 1024)},
}
CONTRACTS = ("tree2.bf16", "tree2.fp32")
TRACKS = ("forward", "backward", "packed")
ONCE = ("proofs", "refusals", "latency")
WIDER = {  # part -> (grids, contracts): sums of more than two ranks run by the tree
    "tp4": ((Grid(tp=4),), ("tree4.bf16",)),
    "cp4": ((Grid(cp=4),), ("tree4.bf16",)),
    "dp": ((Grid(dp=2, cp=2),), ("tree4.bf16", "tree8.bf16")),
}
EIGHT = Grid(dp=2, cp=2, tp=2)
WHAT = (*TRACKS, *ONCE, "layer", *WIDER, "interpreted")
FAULTS = ws2_faults.FAULTS
FEW = 10  # repeats of what is not the version-1 contract
DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,COLL,P2P,SHM,NET,TUNING"}
NCCL = ("default", "Ring/Simple", "Ring/LL", "Ring/LL128", "Tree/Simple", "Tree/LL")

COVERED = ()  # both lists follow from the rows: coverage()
NOT_COVERED = ()


@dataclass(frozen=True)
class Params:
    what: tuple[str, ...] = param(WHAT, "what to look at; the start always is", choices=WHAT)
    size: str = param("small", "small: H=64 I=128; qwen3: H=4096 I=12288", choices=tuple(SIZES))
    m: tuple[int, ...] = param(
        (), "tokens of a rank; by default those of the size, under a fault the most", unit="rows"
    )
    contract: tuple[str, ...] = param(CONTRACTS, "partials, wire and sum", choices=CONTRACTS)
    nccl: tuple[str, ...] = param(
        ("default",), "algorithm/protocol of NCCL, a launch each", choices=NCCL
    )
    repeats: int = param(100, "calls of a boundary whose bits must be equal")
    fault: str = param("none", "what is broken", choices=FAULTS)
    message: tuple[int, ...] = param((8_192, 262_144, 8_388_608), "latency", unit="bytes")
    samples: int = param(20, "timed sums for each message size, after three that warm up")
    seed: tuple[int, ...] = param((11,), "seeds of weights and data")
    device: str = param("auto", "where to compute", choices=("auto", "cpu", "cuda"))


def cases(params: Params) -> list[Case]:
    """Raises UsageError for what cannot run."""
    check_seeds(params.seed)
    size = SIZES[params.size]
    rows = params.m or size["m"]
    if any(m < 1 for m in rows):
        raise UsageError("each m must be at least 1 row")
    if params.repeats < 2 or params.samples < 1:
        raise UsageError("repeats must be at least 2 and samples at least 1")
    if any(b < 2048 or b % 2048 for b in params.message):
        raise UsageError("each message must be a multiple of 2048 bytes: 1024 BF16 values")
    if params.nccl != ("default",) and params.device != "cuda":
        raise UsageError("nccl chooses between algorithms of NCCL: say device=cuda")
    if "interpreted" in params.what and params.what != WHAT and params.device != "cpu":
        raise UsageError("what=interpreted runs the kernels' source on the CPU: say device=cpu")
    if params.fault != "none":
        ws2_faults.check(params)
        wanted = list(_faulty(params, params.m or (max(rows),)))
    else:
        wanted = list(_sound(params, rows))
    common = {"hidden": size["hidden"], "intermediate": size["intermediate"]}
    return [
        Case(NAME, grid, "bf16", seed, params.fault, {**at, **common})
        for grid, at in wanted
        for seed in params.seed
    ]


Wanted = Iterator[tuple[Grid, dict]]


def _sound(params: Params, rows: Sequence[int]) -> Wanted:
    for setting in params.nccl:
        yield HOME, _at("start", 1, params, nccl=setting)
        usual = setting == "default"
        for part in (p for p in TRACKS if p in params.what):
            for contract in params.contract if usual else params.contract[:1]:
                for m in rows if usual else sorted({min(rows), max(rows)}):
                    yield HOME, _at(part, m, params, contract=contract, nccl=setting)
        if not usual:
            continue
        middle = sorted(rows)[len(rows) // 2]
        for part in (p for p in ONCE if p in params.what):
            more = {"samples": params.samples, "messages": "+".join(map(str, params.message))}
            yield HOME, _at(part, middle, params) | (more if part == "latency" else {})
        if "layer" in params.what:
            for split in (False, True):
                yield HOME, _layer(params, max(2, middle), split)
        for part, (grids, contracts) in WIDER.items():
            for grid in grids if part in params.what else ():
                for contract in contracts:
                    yield grid, _at(part, middle, params, contract=contract, reduction="tree")
        if params.device == "cpu":
            yield from _on_cpu(params, middle)


def _on_cpu(params: Params, m: int) -> Wanted:
    """More ranks than there are GPUs; and the kernels' own source, where nothing compiles it."""
    if "dp" in params.what:
        yield EIGHT, _at("start", 1, params)
        yield EIGHT, _at("dp", m, params, contract="tree8.bf16", reduction="tree")
    if "interpreted" in params.what:
        for part in ("start", *TRACKS):
            yield HOME, _at(part, m, params, kernels="interpreted", repeats=2)


def _faulty(params: Params, rows: Sequence[int]) -> Wanted:
    yield HOME, _at("start", 1, params)
    if params.fault == "swap-shards":
        for part, contract in ws2_faults.shown(params):
            for m in rows:
                yield HOME, _at(part, m, params, contract=contract, repeats=2)
    elif params.fault == "wire-dtype":
        for m in rows:
            yield HOME, _at("wire", m, params)
    elif params.fault == "lost-cp-rank":
        yield HOME, _at("lost", rows[0], params, contract=params.contract[0], repeats=2)


def _at(part: str, m: int, params: Params, **more) -> dict:
    contract = more.get("contract", CONTRACTS[0])
    few = part == "packed" or part in WIDER or contract != CONTRACTS[0]
    few = few or more.get("nccl", "default") != "default"
    repeats = min(params.repeats, FEW) if few else params.repeats
    return {"part": part, "m": m, "contract": contract, "reduction": "backend",
            "repeats": repeats, "nccl": "default", **more}  # fmt: skip


def _layer(params: Params, m: int, split: bool) -> dict:
    """The parameters of det-ffn's layer; m of all lanes, as there."""
    return {
        "part": "layer", "m": HOME.cp * (m + m % 2), "contracts": "+".join(params.contract),
        "sequence_parallel": split, "dx": "separate+packed", "dw": "reduce+gather", "repeats": 3,
        "nccl": "default",
    }  # fmt: skip


def environment(case: Case) -> dict[str, str]:
    """What the ranks of a case start with: NCCL tells what it does, and does what is asked."""
    algorithm, _, protocol = case.parameters["nccl"].partition("/")
    asked = {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol} if protocol else {}
    if "kernels" in case.parameters:
        asked["TRITON_INTERPRET"] = "1"
    return {**DEBUG, **asked}


def run(case: Case, comm) -> dict:
    """One case on one rank; the same row on every rank."""
    part = case.parameters["part"]
    if part == "layer":
        from rlkernel.ffn import exactness

        return exactness.layer_row(case, comm)
    if part == "lost":
        from rlkernel.collectives.lost import DiesInside

        comm = comm.using(observers=[DiesInside(2, "gate.dw")])
    from rlkernel.ffn import boundaries, deployment, proofs

    if part == "start":
        row = deployment.start_row(case, comm)
        if not row["alike"] and case.fault == "none":  # nobody may meet such a rank in a sum
            raise UsageError(row["checks"][0][2])
        return row
    rows = {
        "latency": deployment.latency_row,
        "wire": deployment.wire_row,
        "proofs": proofs.proofs_row,
        "refusals": proofs.refusals_row,
        "dp": proofs.replicas_row,
    }
    return rows.get(part, boundaries.track_row)(case, comm)


# -- what is told ----------------------------------------------------------------------------------


def verdict(params: Params, rows: Sequence[Mapping]) -> dict:
    """One check a contract, boundary and property, over all M, seeds and settings; the failing case
    is told. Then whether everything that was asked for is covered."""
    found: dict[str, list[tuple]] = {}
    for row in rows:
        for name, held, value, limit in row["result"]["checks"]:
            found.setdefault(f"{_group(row)} {name}".strip(), []).append(
                (held, f"{_label(row)}: {value}", value, limit)
            )
    checks = [_check(name, told) for name, told in found.items()]
    if params.fault == "none":
        checks.append(ws2_coverage.complete(params, rows))
    return {"passed": bool(rows) and all(check["passed"] for check in checks), "checks": checks}


def _check(name: str, told: list[tuple]) -> dict:
    wrong = [where for held, where, _, _ in told if not held]
    value = wrong[0] if wrong else told[0][2]
    if not wrong and len({value for _, _, value, _ in told}) > 1:
        value = f"{len(told)} of {len(told)} cases"
    return {"name": name, "passed": not wrong, "value": value, "limit": told[0][3]}


def _group(row: Mapping) -> str:
    at = row["case"]["parameters"]
    if at["part"] in (*TRACKS, "lost"):
        return at["contract"]
    if at["part"] in WIDER:
        return f"{Grid(**row['case']['grid'])} {at['contract']}"
    if at["part"] == "layer":
        return "layer, sequence parallel:" if at["sequence_parallel"] else "layer:"
    return ""


def _label(row: Mapping) -> str:
    at = row["case"]["parameters"]
    setting = "" if at["nccl"] == "default" else f" {at['nccl']}"
    setting += " interpreted" if "kernels" in at else ""
    return f"{at['part']} M_local={at['m']}{setting}"


def coverage(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[str]]:
    """(COVERED, NOT COVERED), each line computed from the rows."""
    return ws2_coverage.lists(rows)


def first_wrong(rows: Sequence[Mapping]) -> str | None:
    """The first boundary that does not hold, in the order of the data flow."""
    return next((row["result"]["first_wrong"] for row in rows
                 if row["result"].get("first_wrong")), None)  # fmt: skip


def summary(params: Params, rows: Sequence[Mapping]) -> dict:
    """What runs, where, and every boundary."""
    told = verdict(params, rows)
    covered, not_covered = coverage(params, rows)
    lines = list(ws2_products.lines(rows))
    start = next((r["result"] for r in rows if r["case"]["parameters"]["part"] == "start"), {})
    return {
        "passed": told["passed"],
        "first_wrong": first_wrong(rows),
        "failed": [c["name"] + ": " + str(c["value"]) for c in told["checks"] if not c["passed"]],
        "checks": len(told["checks"]),
        "backend": start.get("backend"),
        "compute": ", ".join(
            dict.fromkeys(f"{line['operands']} operands, FP32 accumulation" for _, line in lines)
        ),
        "versions": start.get("versions"),
        "topology": start.get("topology"),
        "nccl": _nccl(rows),
        "boundaries": [_boundary(row, line) for row, line in lines],
        "covered": covered,
        "not_covered": not_covered,
    }


def _nccl(rows: Sequence[Mapping]) -> dict | None:
    """Setting -> what NCCL used in each group, from its log; None where there was no NCCL."""
    started = [row for row in rows if row["case"]["parameters"]["part"] == "start"]
    told = {row["case"]["parameters"]["nccl"]: row["result"].get("nccl") for row in started}
    return {setting: groups for setting, groups in told.items() if groups} or None


def _boundary(row: Mapping, line: Mapping) -> dict:
    at = row["case"]["parameters"]
    drift = ("max_abs", "p95", "p99", "mean_abs", "rel_l2")
    return {
        "boundary": line["boundary"], "m_local": at["m"], "contract": line["contract"],
        "nccl_setting": at["nccl"], "wire": line["wire"], "groups": line["groups"],
        "reduction": line["reduction"], "schedule": line["schedule"],
        "repeats": line["repeats"], "hashes": 1 + line["repeats_that_differ"],
        "sides": {
            name: {"mismatches": side["mismatches"], "elements": side["elements"],
                   **{key: side["drift"][key] for key in drift}}
            for name, side in line["sides"].items()
        },
    }  # fmt: skip


def table(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    """One line a side of a boundary: bits against the reference, drift against FP32."""
    header = ["boundary", "M_local", "contract", "sum over", "wire", "by", "differ", "max", "p95",
              "p99", "hashes"]  # fmt: skip
    body = []
    for row, line in ws2_products.lines(rows):
        for name, side in line["sides"].items():
            body.append([
                f"{line['boundary']} {name}", str(row["case"]["parameters"]["m"]),
                line["contract"], " ".join(map(str, line["groups"])).replace(", ", ",") or "-",
                line["wire"] or "-", line["reduction"] or "-",
                f"{side['mismatches']} / {side['elements']}",
                *(f"{side['drift'][key]:.2e}" for key in ("max_abs", "p95", "p99")),
                f"{1 + line['repeats_that_differ']} in {line['repeats']}",
            ])  # fmt: skip
    return header, body


def protocol(params: Params) -> dict:
    """What must agree before two records may be compared."""
    return {
        "oracle": "FP32 product of the library on the whole operands",
        "reference": "fixed-order sum of every rank's partial, plain torch, no process group",
        "clock": "perf_counter around one sum, the device idle on both sides; the slowest rank",
        "samples": params.samples,
    }
