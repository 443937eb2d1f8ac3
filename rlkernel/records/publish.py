"""A small copy of a finished run for the repository, without a trace of whose machine it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from rlkernel.records import perfetto, trace
from rlkernel.records.scrub import REPOSITORY, scrub_all
from rlkernel.records.store import (
    ROWS,
    RUN,
    SAMPLES,
    RecordError,
    append_lines,
    now,
    read,
    write_json,
)

SMALL = 1_500_000  # bytes of samples, and of traces, that a repository may carry for one run


class Refused(RecordError):
    """What was asked for cannot be published, and nothing was written."""


def committed_root() -> Path:
    """The results folder whose published/ is committed: $RLKERNEL_PUBLISHED, or results/ in the
    repository. It does not move with the runs.
    """
    chosen = os.environ.get("RLKERNEL_PUBLISHED")
    return Path(chosen).expanduser() if chosen else REPOSITORY / "results"


def publish(run_path: Path | str, name: str | None = None, root: Path | None = None) -> Path:
    """Copy a run to <root>/published/<experiment>/<name>/, root: committed_root() by default.

    Raises Refused for what is no run, or none that is finished, and for a name that is taken:
    committed evidence is never overwritten. RecordError where it cannot be written.
    """
    try:
        record = read(run_path)
    except RecordError as error:
        raise Refused(str(error)) from error
    if record.status != "ok":
        reason = record.run.get("reason")
        why = f" ({reason})" if reason else ""
        raise Refused(f"only a finished run is evidence: this one is {record.status}{why}")
    name = name or Path(run_path).resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise Refused(f"{name!r} is no name for a run: use letters, digits, '-', '_', '.'")
    home = Path(root or committed_root()) / "published" / record.experiment
    target = home / name
    if target.exists():
        raise Refused(f"{record.experiment}/{name} is published already: choose another name")

    run = {key: value for key, value in record.run.items() if key != "process"}
    samples = record.path / SAMPLES
    size = samples.stat().st_size if samples.exists() else 0
    run |= {"published": now(), "samples_left_out": size if size > SMALL else 0}
    home.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
    try:
        draft.chmod(0o755)
        write_json(draft / RUN, _clean(run))
        kept = _traces(record.path / "trace", draft / "trace")
        rows = [
            row | {"traces": []} if "traces" in row and not kept else row for row in record.rows
        ]
        append_lines(draft / ROWS, [_clean(row) for row in rows])
        if 0 < size <= SMALL:
            append_lines(draft / SAMPLES, [_clean(sample) for sample in record.samples])
        draft.rename(target)
    except OSError as error:
        raise RecordError(f"cannot publish to {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _traces(source: Path, target: Path) -> bool:
    """Traces (*rankN.json.gz) written anew, which leaves out what names a machine; none if large.

    Whether they are there. Raises RecordError for a file that is no trace.
    """
    for path in sorted(source.rglob("*.json.gz")):
        rank = re.search(r"rank(\d+)\.json\.gz$", path.name)
        try:
            copy = target / path.relative_to(source)
            perfetto.merge(copy, {int(rank[1]) if rank else 0: path})
        except trace.TraceError as error:
            raise RecordError(f"cannot publish a trace: {error}") from error
    if sum(path.stat().st_size for path in target.rglob("*.json.gz")) > SMALL:
        shutil.rmtree(target)
    return target.exists()


def _clean(obj: dict) -> dict:
    """Scrubbed, and proven to be JSON still."""
    return json.loads(json.dumps(scrub_all(obj)))
