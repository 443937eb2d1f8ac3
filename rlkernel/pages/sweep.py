"""`python -m rlkernel sweep FILE.yaml`: a grid of parameters, resumable, with one index.

    experiment: tp-swiglu          # one measurement a point ...
    notebook: notebooks/x.ipynb    # ... or one executed notebook and its page a point
    fixed: {mode: equivalence}     # the same at every point
    parameters:                    # axes; the points are their product
      nproc: [2, 4]
      dtype: [fp32, bf16]

    results/sweeps/<file's stem>/index.json  index.csv  index.md    replaced after every point

A point is not run again while its parameters and the code are the same and its record is there; one
that crashed is. Every point is checked before the first one is launched.

Exit codes: 0 every check holds, 1 a check failed, 2 bad usage, otherwise the worst of the points'.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlkernel import records
from rlkernel.pages import evidence, parameters, report

KEYS = {"experiment", "notebook", "fixed", "parameters", "name", "timeout_s"}


@dataclass
class Point:
    """One combination of the axes and what became of it. status: pending, ok, or how it ended."""

    parameters: dict
    key: str
    status: str = "pending"
    passed: bool | None = None
    record: str = ""
    seconds: float = 0.0
    error: str = ""
    exit_code: int = 0


@dataclass
class Sweep:
    name: str
    folder: Path
    experiment: str | None
    notebook: Path | None
    fixed: dict
    axes: dict[str, list]
    timeout_s: float
    points: list[Point] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.experiment or self.notebook.name


def load(file: Path | str) -> Sweep:
    """Read and check a sweep file. Raises UsageError; launches nothing."""
    import yaml

    from rlkernel.experiments.case import UsageError, unknown

    file = Path(file)
    try:
        told = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"no such sweep: {file} ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is not YAML: {error}") from None
    if not isinstance(told, dict):
        raise UsageError(f"{file} is not a sweep: a mapping with `parameters:` is expected")
    for name in told:
        if name not in KEYS:
            raise UsageError(unknown("entry", name, sorted(KEYS)))
    if bool(told.get("experiment")) == bool(told.get("notebook")):
        raise UsageError(f"{file}: give either `experiment:` or `notebook:`")
    axes = {name: _axis(values) for name, values in (told.get("parameters") or {}).items()}
    name = told.get("name") or file.stem
    notebook = _find(told["notebook"], file) if told.get("notebook") else None
    folder = records.results_root() / "sweeps" / name
    found = Sweep(
        name, folder, told.get("experiment"), notebook, told.get("fixed") or {}, axes,
        float(told.get("timeout_s", 600)),
    )  # fmt: skip
    found.points = [_point(found, values) for values in itertools.product(*axes.values())]
    return found


def run(file: Path | str, force: bool = False) -> int:
    """Run what is missing -> exit code. force: all of it. Raises UsageError before any launch."""
    sweep = load(file)
    known = {} if force else _known(sweep)
    sweep.points = [known.get(point.key, point) for point in sweep.points]
    count, done = len(sweep.points), sum(point.status == "ok" for point in sweep.points)
    _say(f"{sweep.name}: {count} points, {done} known, {count - done} to run")
    _write(sweep)
    for number, point in enumerate(sweep.points, start=1):
        if point.status == "ok":
            continue
        _say(f"[{number}/{count}] {_words(point.parameters)} ...", end=" ")
        start = time.monotonic()
        try:
            _measure(sweep, point, force)
        except BaseException as error:
            point.status, point.error = "interrupted", f"{type(error).__name__}"
            raise
        finally:
            point.seconds = round(time.monotonic() - start, 2)
            _write(sweep)
        _say(f"{point.seconds:.1f} s {_state(point)}")
    codes = [p.exit_code or int(p.passed is False) for p in sweep.points]
    print(sweep.folder / "index.md")
    return max(codes, default=0)


def _measure(sweep: Sweep, point: Point, force: bool) -> None:
    if sweep.notebook:
        return _execute(sweep, point)
    from rlkernel.run import launch

    try:
        record = launch.measure(
            sweep.experiment,
            {**sweep.fixed, **point.parameters},
            force=force,
            timeout_s=sweep.timeout_s,
        )
    except launch.RunError as error:
        if error.exit_code >= 128:
            raise
        point.status, point.exit_code = error.record.status, error.exit_code
        point.error, point.record = str(error).splitlines()[0], evidence.place(error.record)
        return None
    point.status, point.passed, point.error = record.status, record.passed, ""
    point.exit_code, point.record = 0, evidence.place(record)
    return None


def _execute(sweep: Sweep, point: Point) -> None:
    target = sweep.folder / f"{_file(point)}.ipynb"
    given = {**sweep.fixed, **point.parameters}
    outcome = report.execute(sweep.notebook, target, given, sweep.timeout_s)
    from rlkernel.pages import render

    shown = render.entry(target, name=target.stem, href="", error=outcome.error)
    point.status = "failed" if outcome.error else "ok"
    point.passed = None if outcome.error else all(v["passed"] for v in shown.verdicts)
    point.exit_code, point.error = outcome.exit_code, outcome.error or ""
    point.record = evidence.shown(target.with_suffix(".html"))


def _axis(values) -> list:
    return values if isinstance(values, list) else [values]


def _find(name: str, file: Path) -> Path:
    """A notebook's path counts from here, from the sweep file, or from the root of the tree."""
    places = [Path(name), file.parent / name, report.ROOT / name]
    return next((p.resolve() for p in places if p.is_file()), Path(name))


def _point(sweep: Sweep, values: tuple) -> Point:
    """One point, checked: its key changes with its parameters and with the code that runs it."""
    chosen = dict(zip(sweep.axes, values, strict=True))
    given = {**sweep.fixed, **chosen}
    if sweep.notebook:
        parameters.validate(sweep.notebook, given)
        source = report.inputs_of_package() + records.digest(sweep.notebook.read_text())
    else:
        evidence.typed(sweep.experiment, given)
        source = evidence.source(sweep.experiment) + evidence.seam()
    what = [sweep.title, given, source, records.environment()]
    return Point(chosen, records.digest(what)[:16])


def _known(sweep: Sweep) -> dict[str, Point]:
    """Points of an earlier run that are done: same key, and the record is still there."""
    try:
        told = json.loads((sweep.folder / "index.json").read_text(encoding="utf-8"))["points"]
        points = [Point(**p) for p in told]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    here = [p for p in points if evidence.located(p.record).exists()]
    return {p.key: p for p in here if p.status == "ok"}


# ---- the index -----------------------------------------------------------------------------------


def _write(sweep: Sweep) -> None:
    sweep.folder.mkdir(parents=True, exist_ok=True)
    told = {"name": sweep.name, "of": sweep.title, "fixed": sweep.fixed, "axes": sweep.axes}
    told["points"] = [asdict(point) for point in sweep.points]
    header = [*sweep.axes, "status", "seconds", "record"]
    body = [
        [*(_text(v) for v in p.parameters.values()), _state(p), f"{p.seconds:.1f}", p.record or "-"]
        for p in sweep.points
    ]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([header, *body])
    lines = [header, ["---"] * len(header), *body]
    marked = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    fixed = f"\n\nFixed: {_words(sweep.fixed)}" if sweep.fixed else ""
    _replace(sweep.folder / "index.json", json.dumps(told, indent=1, default=str) + "\n")
    _replace(sweep.folder / "index.csv", table.getvalue())
    _replace(sweep.folder / "index.md", f"# {sweep.name}: {sweep.title}{fixed}\n\n{marked}\n")


def _state(point: Point) -> str:
    if point.status != "ok":
        return f"{point.status}{': ' + point.error if point.error else ''}"
    return "holds" if point.passed else "fails"


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _words(values: dict) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in values.items())


def _file(point: Point) -> str:
    safe = "_".join(f"{n}-{_text(v)}" for n, v in point.parameters.items()) or "point"
    return "".join(c if c.isalnum() or c in "-_.," else "-" for c in safe)


def _text(value) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """`sweep FILE.yaml [--force]`"""
    parser = argparse.ArgumentParser(
        prog="python -m rlkernel sweep",
        description="Run the points of a parameter grid that have not been run yet.",
    )
    parser.add_argument("file", help="YAML file, for example notebooks/sweeps/tp_swiglu.yaml")
    parser.add_argument("--force", action="store_true", help="run every point again")
    asked = parser.parse_args(argv)
    return report.guarded(lambda: run(asked.file, asked.force))
