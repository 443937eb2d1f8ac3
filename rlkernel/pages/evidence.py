"""What a notebook asks for: one record, measured here or given, and the published ones beside it.

    found = evidence.get("tp-swiglu", run=run, nproc=nproc, mode="catalogue")

`run` is a record's folder, or a folder with several of them; "" measures here, where a case that
was measured before is read from its record instead. What cannot be measured on this machine comes
back without a local record and with the command that measures it elsewhere.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rlkernel import records
from rlkernel.records import Record
from rlkernel.records.publish import committed_root

PACKAGE = Path(__file__).resolve().parents[1]
# What makes two records answers to the same question; sizes, seeds and ranks may differ.
KIND = ("mode", "size", "target", "fault", "block", "twin", "dense", "graph", "transport")
KIND += ("backward", "comp_only", "matrix")
PARTS = ("what",)  # a record answers where it has at least the parts that are asked for


@dataclass(frozen=True)
class Evidence:
    """local: measured here or given, None where that is not possible (`missing` says why)."""

    experiment: str
    parameters: dict
    local: Record | None
    published: tuple[Record, ...] = ()
    missing: str = ""

    @property
    def command(self) -> str:
        """The command line that makes this record."""
        words = [f"python -m rlkernel {self.experiment}"]
        for name, value in self.parameters.items():
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            text = text.lower() if isinstance(value, bool) else text
            words.append(f"--{name.replace('_', '-')} {text}")
        return " ".join(words)

    @property
    def records(self) -> list[Record]:
        """The local record first, then the published ones."""
        return [r for r in (self.local, *self.published) if r is not None]


def get(
    experiment: str,
    *,
    run: str = "",
    gpus: int = 0,
    timeout_s: float = 600.0,
    force: bool = False,
    **parameters,
) -> Evidence:
    """The evidence for one question.

    gpus: how many the measurement needs; with fewer nothing is launched. timeout_s: of the launch,
    in seconds. force: measure again what was measured before. Raises UsageError for parameters that
    cannot be, RunError when a rank fails.
    """
    asked = typed(experiment, parameters)
    fits = lambda r: _same(r, asked) and _on(r, gpus, parameters.get("device"))  # noqa: E731
    published = tuple(filter(fits, records.find(experiment, committed_root(), published=True)))
    if run:
        local = _given(experiment, run, fits)
        missing = "" if local else f"{shown(Path(run))} holds no record of this part"
        return Evidence(experiment, parameters, local, published, missing)
    have = len(records.environment()["gpus"])
    if have < gpus:
        return Evidence(experiment, parameters, None, published, f"needs {_count(gpus)}")
    from rlkernel.run import launch

    force = force or os.environ.get("RLKERNEL_FORCE", "") not in ("", "0")
    local = launch.measure(experiment, parameters, force=force, timeout_s=timeout_s)
    if local.status == "skipped":
        return Evidence(
            experiment, parameters, None, published, local.run.get("reason") or "skipped"
        )
    return Evidence(experiment, parameters, local, published)


def timed(found: Evidence, **workload) -> Evidence:
    """The same, of those records alone that hold times of a workload, given as values of a case's
    parameters, such as batch=512: what answers a question may have other sizes than were asked for.
    """

    def fits(record: Record) -> bool:
        rows = [row for row in record.rows if row["result"].get("times")]
        return any(workload.items() <= row["case"]["parameters"].items() for row in rows)

    published = tuple(filter(fits, found.published))
    if found.local is None or fits(found.local):
        return replace(found, published=published)
    sizes = ", ".join(f"{name} {value}" for name, value in workload.items())
    missing = f"{shown(found.local.path)} holds no times at {sizes}"
    return replace(found, local=None, published=published, missing=missing)


def covered(found: Iterable[Record]) -> list[str]:
    """What any of these records covers."""
    return list(dict.fromkeys(line for record in found for line in record.run.get("covered", ())))


def not_covered(found: Iterable[Record]) -> list[str]:
    """What no record of an experiment covers, of all these: a line that one of them does not say
    was covered there.
    """
    lists: dict[str, list[list[str]]] = {}
    for record in found:
        lists.setdefault(record.experiment, []).append(record.run.get("not_covered", []))
    shared = (line for first, *others in lists.values() for line in first
              if all(line in other for other in others))  # fmt: skip
    return list(dict.fromkeys(shared))


def is_stale(record: Record) -> bool:
    """Whether the code has changed since the record was made, or the code that moved its bytes.

    A record of before that was noted is taken by its experiment's own imports alone.
    """
    moved = record.run.get("seam")
    return record.source != source(record.experiment) or moved not in (None, seam())


def source(experiment: str) -> str:
    """The hash of the code that measures an experiment now; "" for one that is not here."""
    return _source(experiment, _changed())


def seam() -> str:
    """The hash of the code that moves bytes between ranks now."""
    from rlkernel.run import launch

    return _hash(launch.plan.SEAM, _changed())


def _changed() -> int:
    return max(p.stat().st_mtime_ns for p in PACKAGE.rglob("*.py"))


@functools.cache
def _hash(module: str, _changed: int) -> str:
    return records.source_hash(module)


@functools.cache
def _source(experiment: str, _changed: int) -> str:
    from rlkernel.experiments import registry

    try:
        return records.source_hash(registry.load(experiment).__name__)
    except (ValueError, ImportError):
        return ""


def place(record: Record) -> str:
    """The record's folder as a page shows it: from results/ on, never a path of this machine."""
    return shown(record.path)


def shown(path: Path) -> str:
    """A path below results/ as a page names it; `located` is the way back."""
    path = path.resolve()
    published = committed_root() / "published"
    homes = {"results/published": published, "results": records.results_root()}
    for name, home in homes.items():
        if path.is_relative_to(home.resolve()):
            return f"{name}/{path.relative_to(home.resolve())}"
    return path.name


def located(name: str) -> Path:
    """Where the record lies that a page calls results/..."""
    inside = name.removeprefix("results/")
    if inside.startswith("published/"):
        return committed_root().resolve() / inside
    return records.results_root().resolve() / inside


def _count(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def typed(experiment: str, parameters: dict):
    """Parameters of an experiment as its Params, checked. UsageError; launches nothing."""
    from rlkernel.experiments import case, registry

    try:
        module = registry.load(experiment)
    except (ValueError, ImportError) as error:
        raise case.UsageError(str(error)) from None
    params = case.parse_params(module.Params, parameters)
    module.cases(params)  # a combination that cannot be is refused before anything else
    return params


def _same(record: Record, asked) -> bool:
    """The same kind of question: equal where both say anything about it."""
    for name in KIND:
        mine, theirs = getattr(asked, name, None), record.run.get("parameters", {}).get(name)
        if mine is not None and theirs is not None and _plain(mine) != _plain(theirs):
            return False
    for name in PARTS:
        there = record.run.get("parameters", {}).get(name)
        # A layout turns what was asked into another part: its cases say which one.
        told = {case["parameters"].get(name) for case in record.run.get("cases", ())} - {None}
        if there is not None and not set(getattr(asked, name, ())) <= (told or set(there)):
            return False
    wanted = getattr(asked, "nodes", None)
    return wanted is None or wanted == _nodes(record)


def _nodes(record: Record) -> int:
    """On how many nodes its ranks found themselves: what was asked for is not what counts."""
    told = [row["result"].get("topology") or {} for row in record.rows]
    return max((at.get("nodes", 1) for at in told), default=1)


def _on(record: Record, gpus: int, device: str | None) -> bool:
    """Whether a record may answer for that many GPUs: one measured on the CPU may not. Nor may one
    of GPUs where the CPU was asked for by name.
    """
    if device == "cpu":
        return record.run.get("device") == "cpu"
    return not gpus or record.run.get("device") != "cpu"


def _plain(value):
    """A value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _given(experiment: str, run: str, fits) -> Record | None:
    """The newest fitting record at or below a folder. RecordError where there is none at all."""
    fitting = [r for r in below(run) if r.experiment == experiment and fits(r)]
    return max(fitting, key=lambda r: r.run.get("started", ""), default=None)


def published(results: Path) -> list[Record]:
    """All published records of a results folder, by experiment and name, so that the order does not
    depend on when somebody looks.
    """
    folders = sorted(path.parent for path in (results / "published").glob("*/*/run.json"))
    return [records.read(folder) for folder in folders]


def below(run: str) -> list[Record]:
    """Every record at or below a folder. RecordError where there is none."""
    folder = Path(run) if Path(run).is_absolute() else _from_root(run)
    places = [folder] if (folder / "run.json").is_file() else sorted(folder.glob("**/run.json"))
    found = [records.read(p if p.is_dir() else p.parent) for p in places]
    if not found:
        raise records.RecordError(f"no record at {run}")
    return found


def _from_root(run: str) -> Path:
    """A relative path counts from here, or else it is one that a page names."""
    here = Path(run)
    return here if here.exists() else located(run)
