"""What every reconstruction experiment is made of: its cases, a run, checks, summary and table.

A reconstruction trains a dense block and its tensor-parallel twin for a step and compares every
signal that training depends on, in the order in which a wrong one would appear. The first that
leaves its bound is `first_wrong`. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlkernel.collectives.faults import Fault
from rlkernel.experiments import signals as of_rows
from rlkernel.experiments.case import DTYPES, TARGETS, Case, UsageError, check_seeds, param
from rlkernel.grid import Grid

LEARNING_RATE = 0.05
SMALLEST = "smallest"  # each case at the smallest size at which it is possible and can show
ARTICLE_STD = 0.2
ARTICLE_BOUNDS = {"output": 5e-7, "loss": 5e-7}  # every other signal: 1e-7
ARTICLE_BOUND = 1e-7
# equal steps run at most for the bit comparison, by detector; "none": the correct twin
REPEATS = {"none": 2, "equivalence": 1, "repeat": 8}
# the last word of a site -> the signal in which its sum shows first; other sites: the last signal
BEHIND = {"forward": "output", "dx": "input_grad"}


@dataclass(frozen=True)
class BaseParams:
    """What every reconstruction can be asked; a block adds its modes, faults and sizes."""

    nproc: tuple[int, ...] = param((2,), "tensor-parallel group sizes", unit="ranks")
    mode: str = param("equivalence", "")
    fault: str = param("none", "")
    seed: tuple[int, ...] = param((11, 12, 13, 14, 15), "seeds of weights, input and target")
    size: str = param("article", "")
    dtype: tuple[str, ...] = param(("fp32",), "dtypes of weights and activations", choices=DTYPES)
    target: str = param("auto", "where the ranks compute", choices=TARGETS)
    sequence_parallel: tuple[str, ...] = param(
        ("off",),
        "split the sequence outside the linear layers; `off,on` measures both",
        choices=("off", "on"),
    )
    twin: tuple[str, ...] = param(
        ("ours",),
        "whose tensor parallelism: ours, or torch's parallelize_module as a second opinion",
        choices=("ours", "torch"),
    )


def size_of(sizes: Mapping[str, object], text: str):
    """The `size` field of a block with these sizes."""
    text += "; smallest: each case at the first of them at which it is possible and can show"
    return param("article", text, choices=(*sizes, SMALLEST))


def mode_of(faults: Mapping[str, Fault]):
    """The `mode` field of a block with these faults."""
    text = (
        "inspect: shapes only; equivalence: the correct twin; "
        "catalogue: the correct twin and every fault; or the name of one fault"
    )
    choices = ("equivalence", "inspect", "catalogue", *faults)
    return param("equivalence", text, choices=choices)


def fault_of(faults: Mapping[str, Fault]):
    """The `fault` field of a block with these faults."""
    text = "fault to inject (the same as naming it as the mode)"
    return param("none", text, choices=("none", *faults))


@dataclass(frozen=True)
class Reconstruction:
    """One block's experiment. block: loads the block's class, with torch.

    json_keys: signal -> its key in the summary, in order. legal_tp: size -> group sizes, tp_rule:
    why. torch_tp: the largest group over which torch's own styles can split the block.
    """

    name: str
    json_keys: Mapping[str, str]
    faults: Mapping[str, Fault]
    sizes: Mapping[str, Mapping[str, int]]
    legal_tp: Mapping[str, tuple[int, ...]]
    tp_rule: str
    block_path: str
    block: Callable[[], type]
    torch_tp: int = 8

    @property
    def signals(self) -> tuple[str, ...]:
        return tuple(self.json_keys)

    # -- cases -------------------------------------------------------------------------------------

    def cases(self, params) -> list[Case]:
        """Every combination asked for. Raises UsageError for one that cannot be or cannot show."""
        legal = sorted({tp for size in self._asked(params) for tp in self.legal_tp[size]})
        check_seeds(params.seed)
        for tp in params.nproc:
            if tp not in legal:
                raise UsageError(
                    f"nproc={tp} is not possible at the {params.size} size: expected one of "
                    f"{', '.join(map(str, legal))} ({self.tp_rule})"
                )
        if "on" in params.sequence_parallel and params.size == "article":
            raise UsageError(
                "sequence_parallel=on needs size=realistic: the article's few positions do not "
                "divide over ranks"
            )
        return [
            Case(
                self.name,
                grid,
                dtype,
                seed,
                fault,
                {"size": size, "sequence_parallel": split, "twin": twin, "mode": kind},
            )
            for tp in params.nproc
            for dtype in params.dtype
            for split in params.sequence_parallel
            for twin in params.twin
            for size, fault, grid, kind in self._variants(params, tp, dtype, split, twin)
            for seed in (params.seed[:1] if kind == "inspect" else params.seed)
        ]

    def _variants(
        self, params, tp: int, dtype: str, split: str, twin: str
    ) -> list[tuple[str, str, Grid, str]]:
        """(size, fault, grid, kind of case) to run with tp ranks."""
        if twin == "torch" and (tp > self.torch_tp or split == "on"):
            raise UsageError(
                f"twin=torch is not possible at nproc={tp} with sequence_parallel={split}: torch's "
                f"column and row styles split this block over at most {self.torch_tp} ranks, "
                f"with sequence_parallel=off"
            )
        asked = params.mode if params.mode in self.faults else params.fault
        if params.fault != "none" and params.mode not in ("equivalence", params.fault):
            raise UsageError(
                f"mode={params.mode} and fault={params.fault} contradict each other: give one"
            )
        kind = "inspect" if params.mode == "inspect" else "step"
        sizes = self._places(params, tp, split)

        def shown(*faults: Fault) -> list[tuple[str, str, Grid, str]]:
            found = []
            for fault in faults:
                grids = [(size, self._grid(fault, size, tp, dtype, split)) for size in sizes]
                found += [(size, fault.name, grid, kind) for size, grid in grids if grid][:1]
            return found

        if asked != "none":
            if twin != "ours":
                raise UsageError(f"fault {asked} is injected into our own twin only: twin=ours")
            fault = self.faults[asked]
            if not shown(fault):
                raise UsageError(
                    f"fault {asked} cannot show on {tp} rank(s) in {dtype} at the {params.size} "
                    f"size{_where(fault)}"
                )
            return shown(fault)
        broken = []
        if params.mode == "catalogue" and twin == "ours":
            both = params.size == SMALLEST and split == "on" and "off" in params.sequence_parallel
            broken = shown(*(f for f in self.faults.values() if f.only or not both))
        beside = dict.fromkeys((sizes[0], *(size for size, *_ in broken)))
        return [(size, "none", Grid(tp=tp), kind) for size in beside] + broken

    def _asked(self, params) -> tuple[str, ...]:
        """The sizes that may be run, the smallest first."""
        return tuple(self.sizes) if params.size == SMALLEST else (params.size,)

    def _places(self, params, tp: int, split: str) -> list[str]:
        """Of these, the ones at which a block can be split in this way."""
        return [
            size
            for size in self._asked(params)
            if tp in self.legal_tp[size] and (split == "off" or size != "article")
        ]

    def _grid(self, fault: Fault, size: str, tp: int, dtype: str, split: str) -> Grid | None:
        """The grid on which the fault shows under these options, None if it cannot."""
        if fault.only == "sequence_parallel" and split == "off":
            return None
        if fault.detector == "repeat" and size == "article" and dtype == "bf16":
            return None  # a handful of BF16 products: FP32 adds them exactly, in any order
        return fault.grid(tp)

    # -- one case ----------------------------------------------------------------------------------

    def run(self, case: Case, comm) -> dict:
        """Train both blocks on this rank; every signal's worst rank. The same on all ranks."""
        from rlkernel.contract import DTYPES as TORCH_DTYPES
        from rlkernel.contract import ReductionTree
        from rlkernel.reconstruct import second_opinion, step

        options, fault = case.parameters, self.faults.get(case.fault)
        std = ARTICLE_STD if options["size"] == "article" else None
        split = options["sequence_parallel"] == "on"
        shape = {**self.sizes[options["size"]], **(fault.fixture if fault else {})}
        block = self.block()(case.seed, TORCH_DTYPES[case.dtype], std, split, **shape)
        comm = comm.using(contract=ReductionTree(comm.grid.size, "fp32"))
        if options["mode"] == "inspect":
            return {"passed": True, "shapes": block.shapes(comm)}
        if options["twin"] == "torch":
            pairs, unsteady = second_opinion.train_both(block, comm, LEARNING_RATE), set()
        else:
            pairs, unsteady = _train(block, fault, comm)
        bounds = self._bounds(case)
        mine = {
            "signals": {
                s: step.compare_signal(pairs[s], block.dtype, bounds.get(s)) for s in self.signals
            },
            "digest": {s: step.fingerprint(pairs[s].twin) for s in self.signals},
            "unsteady": sorted(unsteady),
        }
        ranks = comm.collect(mine)
        signals = {s: step.worst([r["signals"][s] for r in ranks]) for s in self.signals}
        sites = sorted({site for r in ranks for site in r["unsteady"]})
        shaky = {BEHIND.get(site.rpartition(".")[2], self.signals[-1]) for site in sites}
        wrong = [s for s in self.signals if signals[s]["excess"] > 1 or s in shaky]
        expected, first = fault.first_wrong if fault else None, wrong[0] if wrong else None
        return {
            "passed": first is None,
            "first_wrong": first,
            "expected_first_wrong": expected,
            "caught": first == expected if fault else None,
            "seen_by": _seen_by(first, signals),
            "unsteady_sites": sites,
            "contract": comm.contract.name,
            "signals": signals,
            "digest": {s: [r["digest"][s] for r in ranks] for s in self.signals},
            "shapes": block.shapes(comm),
        }

    def _bounds(self, case: Case) -> dict[str, float]:
        """The article's bounds hold its own fixture to the letter; elsewhere rounding decides."""
        options = case.parameters
        if options["size"] != "article" or case.dtype != "fp32" or options["twin"] != "ours":
            return {}
        return {s: ARTICLE_BOUNDS.get(s, ARTICLE_BOUND) for s in self.signals}

    # -- what the rows say -------------------------------------------------------------------------

    def verdict(self, params, rows: Sequence[Mapping]) -> dict:
        return of_rows.checks(rows, self.signals, catalogue=params.mode == "catalogue")

    def summary(self, params, rows: Sequence[Mapping]) -> dict:
        if params.mode == "inspect":
            shapes = rows[0]["result"]["shapes"]
            return {"mode": "inspect", "block_path": self.block_path, **shapes, "passed": True}
        mode = params.fault if params.fault != "none" else params.mode
        passed = self.verdict(params, rows)["passed"]
        return of_rows.summary(mode, rows, self.json_keys, passed)

    def table(self, params, rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
        if params.mode == "inspect":
            return of_rows.shape_table([row["result"]["shapes"] for row in rows])
        return of_rows.table(rows, self.signals)

    def protocol(self, params) -> dict:
        """Nothing is timed: what must be equal is the size, the learning rate and the bounds."""
        bounds = {**ARTICLE_BOUNDS, "other": ARTICLE_BOUND}
        size = self.sizes.get(params.size, self.sizes)
        return {"size": size, "lr": LEARNING_RATE, "article bounds": bounds}


def _train(block, fault: Fault | None, comm) -> tuple[Mapping, set[str]]:
    """(signals of the twin under the fault, sites whose result changed between equal steps).

    The bits behind each collective are compared, in FP32: what comes out of a BF16 block can hide a
    changed order of additions in its rounding.
    """
    from rlkernel import compare
    from rlkernel.collectives.observers import Capture

    local = block.shard(block.weights(comm.device), comm)
    broken, local = fault.put_into(comm, local) if fault else (comm, local)
    seen = Capture(keep=compare.digest)
    broken = broken.using(observers=(seen,))
    steps = fault.steps if fault else 1
    repeats = REPEATS[fault.detector if fault else "none"]
    first, unsteady = None, set()
    for number in range(repeats):
        seen.calls.clear()
        pairs = block.train_both(broken, LEARNING_RATE, steps=steps, local=local)
        behind = seen.behind()
        first = first or (pairs, behind)
        unsteady |= {site for site in behind if behind[site] != first[1][site]}
        if 0 < number < repeats - 1 and any(comm.collect(bool(unsteady))):
            break  # what was to be seen is seen
    return first[0], unsteady


def _seen_by(first: str | None, signals: Mapping) -> str | None:
    if first is None:
        return None
    return "equivalence" if signals[first]["excess"] > 1 else "repeat"


def _where(fault: Fault) -> str:
    words = f": it needs nproc >= {fault.smallest.tp}"
    if fault.smallest.dp > 1:
        shown = " or ".join(str(tp) for tp in (1, 2, 4) if fault.grid(tp))
        words = f": it is shown at nproc={shown} with dp={fault.smallest.dp}"
    if fault.detector == "repeat":
        words += ", and sums that round (fp32, or size=realistic)"
    return words + (" and sequence_parallel=on" if fault.only == "sequence_parallel" else "")
