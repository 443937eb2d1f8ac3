"""Tables of README.md that say what things cost, each from the latest record that has it."""

from __future__ import annotations

from collections.abc import Callable

from rlkernel.figures import counters
from rlkernel.pages import evidence
from rlkernel.records import Record

STALE = " (stale)"
TRANSPORTS = {"symmetric": "symmetric memory", "nccl": "NCCL's process groups"}


def source(record: Record) -> str:
    """Where a number comes from, marked when the code has changed since."""
    mark = STALE if evidence.is_stale(record) else ""
    return f"`results/published/{record.experiment}/{record.path.name}`{mark}"


def timed(found: list[Record]) -> Record | None:
    """The record of the forward, timed beside the official layer under every contract."""
    return _latest(found, "det-ffn", lambda row: lines(row, "ffn"), graph=True)


def forward(found: list[Record]) -> list[str]:
    """Time of a forward over the official layer's, M by M."""
    record = timed(found)
    if record is None:
        return []
    what = "Forward of the FFN, {}, hot, CUDA graphs on all sides, medians; ratios paired by call."
    return _by_m(record, "ffn", what)


def trained(found: list[Record]) -> Record | None:
    """The record of the training step, timed in the same way."""
    return _latest(found, "det-ffn", lambda row: lines(row, "train"), graph=True)


def step(found: list[Record]) -> list[str]:
    """The same of forward + backward, under the contracts that a layer has."""
    record = trained(found)
    if record is None:
        return []
    what = "Forward + backward (dX and all three dW), {}, measured in the same way."
    return _by_m(record, "train", what, most=3)


def two_gpus(found: list[Record]) -> list[str]:
    """Layouts of two ranks over the faster official layer on one GPU, the newest record of each
    transport: one is no answer for the other.
    """
    newest = {
        name: _latest(found, "det-ffn", lambda row: lines(row, "time"), transport=asked)
        for asked, name in TRANSPORTS.items()
    }
    text: list[str] = []
    for name, record in newest.items():
        if record is not None:
            text += _layouts(record, name)
    return text


def _layouts(record: Record, transport: str) -> list[str]:
    body, plain = [], {}
    for row in record.rows:
        at, told = row["case"]["parameters"], {}
        for line in lines(row, "time"):
            if line.get("mode") == "graph":
                told.setdefault(line["operator"], line)
            else:
                plain.setdefault(at["m"], []).append(line["ratio"]["median"])
        cells = [
            text
            for kind in ("forward", "step")
            for text in (f"{told[kind]['median_us']:.1f}", f"{told[kind]['ratio']['median']:.3f}")
        ]
        body.append([at["layout"], f"{at['m']:,}", *cells])
    heads = ["forward, us", "/ official on one GPU", "step, us", "/ official on one GPU"]
    said = ", ".join(f"{min(r):.2f} to {max(r):.2f} at M = {m:,}" for m, r in plain.items())
    return [
        *_table(["layout", "M", *heads], body),
        "",
        f"Sums by {transport}. Wall time of the slowest rank, CUDA graphs on both sides, over the "
        f"faster of the plain and the compiled official layer{'; as plain calls ' * bool(said)}"
        f"{said}. From {source(record)}, {record.machine_label}.",
    ]


def sums(found: list[Record]) -> list[str]:
    """One tree all-reduce over the library's, by message size."""
    has = lambda row: row["result"].get("lines")  # noqa: E731
    record = _latest(found, "wire", has, transport="symmetric")
    if record is None:
        return []
    body = []
    for row in record.rows:
        told = {x["variant"]: x for x in row["result"]["lines"] if x["graph"]}
        ours, theirs = told["this transport"], told["library"]
        body.append([f"{ours['message'] // 1024:,}", f"{theirs['median_us']:.1f}",
                     f"{ours['median_us']:.1f}", f"{ours['ratio']['median']:.3f}"])  # fmt: skip
    heads = ["all-reduce, KiB", "NCCL, us", "tree by symmetric memory, us", "tree / NCCL"]
    return [*_table(heads, body), "", f"From {source(record)}, {record.machine_label}."]


PRODUCTS = {"gemm1": "GEMM1, dispatch inside", "gemm2": "GEMM2 + bias, combine inside",
            "dh": "dH, dispatch inside", "dx": "dX, combine inside"}  # fmt: skip


def fused(found: list[Record]) -> list[str]:
    """The GEMMs with the exchange inside over the library's, nothing sent; the pass between them
    over a device copy.
    """
    record = _latest(found, "a2a-gemm", _has_times)
    if record is None:
        return []
    body = []
    for row in record.rows:
        part = row["case"]["parameters"]["part"]
        told = {line["variant"]: line for line in row["result"]["lines"] if "median_us" in line}
        if part in PRODUCTS:
            biased = "speed_bias" in told["chosen"]
            theirs = told["bmm + bias" if biased else "bmm"]
            speed = told["chosen"]["speed_bias" if biased else "speed"]
            cells = [theirs["median_us"], told["chosen"]["median_us"], speed["median"]]
            body.append([PRODUCTS[part], *_numbers(cells)])
        elif part == "pass":
            for way in ("forward", "backward"):
                us, share = told[way]["median_us"], told[way]["of_copy"]["median"]
                name = f"norm_gate {way}: share of a copy's rate"
                body.append([name, "-", *_numbers([us, share])])
    at = record.rows[0]["case"]["parameters"]
    shape = f"P={at['ranks']} B={at['batch']} T={at['tokens']} D={at['dim']} k={at['k']}"
    heads = [shape, "library, us", "ours, us", "library / ours"]
    return [
        *_table(heads, body), "",
        "BF16, hot, interleaved, the same bits; every flag is set and nothing is sent, so this is "
        f"no overlap. From {source(record)}, {record.machine_label}.",
    ]  # fmt: skip


def beside(found: list[Record]) -> list[str]:
    """What a product pays for what runs beside it, by hardware counters."""
    record = _latest(found, "counters", _has_cycles)
    if record is None:
        return []
    body = [
        [line["gemm"], counters.beside(line), f"{line['cycles_ratio']:.3f}",
         f"{line['ratio']['median']:.3f}", f"{line['tensor_cycles']:.0%}", f"{line['mhz']:,.0f}",
         *(f"{line[name] / 1e6:,.0f}" for name in ("dram_read", "dram_written", "l2"))]
        for line in _shared(record)
    ]  # fmt: skip
    heads = ["product", "beside", "cycles / alone", "time / alone", "tensor cores at work", "MHz",
             "memory read, MB", "written, MB", "L2, MB"]  # fmt: skip
    at = next(row["case"]["parameters"] for row in record.rows if _has_cycles(row))
    size = f"(B, T, D, k) = ({at['batch']}, {at['tokens']}, {at['dim']}, {at['k']})"
    costs = [row["result"].get("sampling_costs") for row in record.rows]
    read = [f" A call while they are read takes {cost:.3f} of its time." for cost in costs if cost]
    return [
        *_table(heads, body), "",
        f"One rank's products of {size} on P = {at['ranks']}, BF16, hot; hardware counters of the "
        f"whole GPU, of both that run.{''.join(read)} From {source(record)}, "
        f"{record.machine_label}.",
    ]  # fmt: skip


def cycles(record: Record) -> dict[str, str]:
    """What runs beside a product -> the span, over the products, of its cycles over those alone."""
    found: dict[str, list[float]] = {}
    for line in _shared(record):
        if line["beside"] != "alone":
            found.setdefault(counters.beside(line), []).append(line["cycles_ratio"])
    return {name: f"{min(each):.2f} to {max(each):.2f}" for name, each in found.items()}


def _shared(record: Record) -> list[dict]:
    return [line for row in record.rows if _has_cycles(row) for line in row["result"]["lines"]]


def _has_cycles(row: dict) -> bool:
    """Of a product beside others that lasted, each interval counted."""
    return row["passed"] and any("cycles_ratio" in line for line in row["result"].get("lines", ()))


def _has_times(row: dict) -> bool:
    return any("median_us" in line for line in row["result"].get("lines", ()))


def _numbers(cells: list[float]) -> list[str]:
    return [*(f"{us:.1f}" for us in cells[:-1]), f"{cells[-1]:.3f}"]


def _latest(
    found: list[Record], experiment: str, has: Callable[[dict], object], **asked
) -> Record | None:
    chosen = [
        record
        for record in found
        if record.experiment == experiment
        and all(record.run.get("parameters", {}).get(k, v) == v for k, v in asked.items())
        and any(has(row) for row in record.rows)
    ]
    return max(chosen, key=lambda record: record.run.get("started", ""), default=None)


def lines(row: dict, what: str) -> list[dict]:
    """A row's lines that were timed beside the official layer."""
    if row["case"]["parameters"].get("what") != what:
        return []
    return [line for line in row["result"].get("lines", ()) if "official" in line.get("ratios", {})]


def _by_m(record: Record, what: str, text: str, most: int | None = None) -> list[str]:
    rows = [row for row in record.rows if lines(row, what)]
    contracts = [line["contract"] for line in lines(rows[0], what)][:most]
    body = []
    for row in sorted(rows, key=lambda r: r["case"]["parameters"]["m"]):
        told = {line["contract"]: line for line in lines(row, what)}
        theirs = next(iter(told.values()))["official_us"]
        ratios = [told[c]["ratios"]["official"]["median"] for c in contracts]
        body.append([
            f"{row['case']['parameters']['m']:,}", f"{theirs:.1f}",
            *(f"{told[c]['median_us']:.1f}" for c in contracts), *(f"{x:.3f}" for x in ratios),
        ])  # fmt: skip
    heads = ["M", "official, us", *(f"{c}, us" for c in contracts)]
    heads += [f"{c} / official" for c in contracts]
    at = rows[0]["case"]["parameters"]
    size = f"H={at['hidden']}, I={at['intermediate']}, BF16"
    return [*_table(heads, body), "",
            f"{text.format(size)} From {source(record)}, {record.machine_label}."]  # fmt: skip


def _table(heads: list[str], body: list[list[str]]) -> list[str]:
    return ["", *markdown(heads, body)]


def markdown(heads: list[str], body: list[list[str]]) -> list[str]:
    """The lines of a table."""
    return ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|",
            *("| " + " | ".join(cells) + " |" for cells in body)]  # fmt: skip
