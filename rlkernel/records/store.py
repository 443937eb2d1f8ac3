"""Run folders: one measurement, one folder, readable at any moment of its life.

    results/<experiment>/<UTC>-<source8>-<key8>/
        run.json        what was asked, what happened; replaced as a whole, never half written
        cases.jsonl     one row a case, appended as the case ends
        samples.jsonl   raw samples, every rank and iteration
        trace/          rankN.json.gz, what a profiler saw of each rank, where one was asked
        log/rankN.txt   what each rank printed

The folder appears with its run.json in one step. Whoever dies leaves a folder that reads: a torn
last row is not there, and a status "running" whose process is gone is "killed".
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from rlkernel.records import machine
from rlkernel.records.scrub import REPOSITORY

SCHEMA = 1
STATUSES = ("running", "ok", "crashed", "killed", "interrupted", "timed-out", "skipped")
RUN, ROWS, SAMPLES = "run.json", "cases.jsonl", "samples.jsonl"


class RecordError(RuntimeError):
    """A record could not be written (disk full, no permission) or does not read."""


def results_root() -> Path:
    """$RLKERNEL_RESULTS, or results/ in the repository."""
    chosen = os.environ.get("RLKERNEL_RESULTS")
    return Path(chosen).expanduser() if chosen else REPOSITORY / "results"


def now() -> str:
    """UTC to the microsecond, sortable as text."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


class RunFolder:
    """The write side. One process updates run.json; one process appends rows."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls, experiment: str, source8: str, key8: str, run: dict, root: Path | None = None
    ) -> RunFolder:
        """A new folder with `run` as its first run.json, status "running", owned by this process.

        Raises RecordError and leaves nothing behind where it cannot be written.
        """
        home = Path(root or results_root()) / experiment
        run = {"schema": SCHEMA, "experiment": experiment} | run
        run |= {"status": "running", "reason": None}
        run |= {"started": now(), "process": machine.identity()}
        draft: Path | None = None
        try:
            home.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
            draft.chmod(0o755)  # mkdtemp is private; a record is to be read
            (draft / "log").mkdir()
            write_json(draft / RUN, run)
            return cls(_name_it(draft, home, source8, key8))
        except OSError as error:
            raise cannot("create a run folder in", home, error) from error
        finally:
            if draft is not None:
                shutil.rmtree(draft, ignore_errors=True)  # gone already where all went well

    def update(self, **fields: object) -> dict:
        """Replace fields of run.json; a reader sees the old or the new one, never a mixture."""
        status = fields.get("status", "running")
        if status not in STATUSES:
            raise ValueError(f"unknown status {status!r}: expected one of {', '.join(STATUSES)}")
        path = self.path / RUN
        run = _read_json(path) | fields
        try:
            write_json(path, run)
        except OSError as error:
            raise cannot("replace", path, error) from error
        return run

    def append_row(self, row: dict) -> None:
        """One finished case: on disk when this returns, or RecordError and the file as it was."""
        append_lines(self.path / ROWS, [row])

    def append_samples(self, samples: list[dict]) -> None:
        append_lines(self.path / SAMPLES, samples)


@dataclass(frozen=True)
class Record:
    """The read side: a folder as it was found. `rows` stand in the order of run["case_keys"]."""

    path: Path
    run: dict
    rows: list[dict]

    @property
    def status(self) -> str:
        """As written, except that "running" without its process is "killed"."""
        status = self.run.get("status", "killed")
        if status == "running" and not machine.alive(self.run.get("process")):
            return "killed"
        return status

    @property
    def passed(self) -> bool:
        """Finished, and every check holds."""
        return self.status == "ok" and bool((self.run.get("verdict") or {}).get("passed"))

    @property
    def exit_code(self) -> int:
        """What the command line ended with, or would have: 0 and 1 for a finished run."""
        if self.status == "ok":
            return 0 if self.passed else 1
        code = self.run.get("exit_code")
        if code is None:
            return 1 if self.status == "skipped" else 137
        return code

    @property
    def experiment(self) -> str:
        return self.run["experiment"]

    @property
    def source(self) -> str:
        return self.run.get("source", "")

    @property
    def parameters(self) -> dict:
        return self.run.get("parameters", {})

    @property
    def machine_label(self) -> str:
        return machine.label(self.run.get("environment", {}))

    @cached_property
    def samples(self) -> list[dict]:
        """Raw samples, read when first asked for."""
        return read_lines(self.path / SAMPLES)

    def log(self, rank: int) -> str:
        """What a rank printed; "" where it never came so far."""
        path = self.path / "log" / f"rank{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""


def read(path: Path | str) -> Record:
    """The record in a folder. Raises RecordError where there is none or it does not read."""
    path = Path(path)
    run = _read_json(path / RUN)
    if not isinstance(run, dict) or "experiment" not in run:
        raise RecordError(f"{path / RUN} is not a run's record")
    return Record(path, run, _in_order(read_lines(path / ROWS), run.get("case_keys", [])))


def find(experiment: str, root: Path | None = None, published: bool = False) -> list[Record]:
    """Records of an experiment, newest first; folders that do not read are passed over."""
    home = Path(root or results_root())
    home = home / "published" / experiment if published else home / experiment
    found = []
    for folder in home.iterdir() if home.is_dir() else ():
        if folder.name.startswith(".") or not (folder / RUN).is_file():
            continue
        with contextlib.suppress(RecordError):
            found.append(read(folder))
    return sorted(found, key=lambda r: (r.run.get("started", ""), r.path.name), reverse=True)


def write_json(path: Path, obj: object) -> None:
    """Write a neighbour, fsync, rename, fsync the folder. On OSError `path` is as it was."""
    text = json.dumps(obj, indent=1) + "\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def append_lines(path: Path, objects: list[dict]) -> None:
    """Append JSON lines in one write and fsync. Where only a part fits, that part is taken back.

    So is the torn last line of an earlier writer: with ours behind it, it would never read again.

    Raises RecordError when the disk is full (or the file may not be written), and for an object
    that is not JSON.
    """
    if not objects:
        return
    try:
        data = "".join(json.dumps(obj) + "\n" for obj in objects).encode()
    except (TypeError, ValueError) as error:
        raise RecordError(f"a row for {path.name} is not JSON: {error}") from error
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise cannot("open", path, error) from error
    try:
        before = _whole_lines(file)
        try:
            rest = memoryview(data)
            while rest:  # a short write says why only when asked to go on
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file, before)
            raise cannot("append to", path, error) from error
    finally:
        os.close(file)


def _whole_lines(file: int) -> int:
    """The size of an open file once a torn last line is cut off."""
    size = os.fstat(file).st_size
    if size == 0 or os.pread(file, 1, size - 1) == b"\n":
        return size
    whole = os.pread(file, size, 0).rfind(b"\n") + 1
    os.ftruncate(file, whole)
    return whole


def read_lines(path: Path) -> list[dict]:
    """The rows of a JSON-lines file ([] without one). A torn last line is left out.

    Raises RecordError for any other line that does not parse.
    """
    if not path.is_file():  # a device has no end
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # behind the last newline: torn, or nothing
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise RecordError(f"{path}, line {number}: {error}") from error
    return rows


def _name_it(draft: Path, home: Path, source8: str, key8: str) -> Path:
    """Move the draft to its name. The same request twice in a second waits for the next one."""
    while True:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        path = home / f"{stamp}-{source8}-{key8}"
        try:
            os.rename(draft, path)  # refuses a folder that has something in it
            return path
        except OSError:
            if not path.exists():
                raise
        time.sleep(0.1)


def _in_order(rows: list[dict], keys: list[str]) -> list[dict]:
    """One row a case, the last one written, in the order in which the cases were asked for."""
    last = {row["key"]: row for row in rows}
    place = {key: i for i, key in enumerate(keys)}
    return sorted(last.values(), key=lambda row: place.get(row["key"], len(place)))


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecordError(f"no record here: {path} does not exist") from error
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} does not read: {error}") from error


def cannot(what: str, path: Path, error: OSError) -> RecordError:
    """The named error for what the disk refused."""
    return RecordError(f"cannot {what} {path}: {error.strerror or error}")
