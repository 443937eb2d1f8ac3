"""`python -m rlkernel report` and `notebook`: run notebooks, render pages, tell the truth at the
end.

    results/report/
        index.html             each notebook's question, verdicts, machine, main figure
        <notebook>.html        its page
        <notebook>.ipynb       the same, executed
        .pages.json            what each page was made from

A page whose inputs (notebook, package, environment, records) have not changed is kept. A notebook
that fails keeps what it had shown so far, is marked on the index, and makes the exit code nonzero.

Exit codes: 0 every notebook completed; 1 one raised an error; 2 bad usage, nothing launched; 3 a
kernel died; 4 out of time; 128+n a signal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

from rlkernel import records
from rlkernel.pages import parameters
from rlkernel.records.publish import committed_root

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
INPUTS = ".pages.json"
TIMEOUT_S = 1800.0


class ReportError(RuntimeError):
    """At least one notebook failed; `index` exists all the same and says which."""

    def __init__(self, index: Path, failures: dict[str, str], exit_code: int):
        said = "; ".join(f"{name}: {error}" for name, error in failures.items())
        super().__init__(f"{len(failures)} notebook(s) failed: {said}")
        self.index, self.failures, self.exit_code = index, failures, exit_code


def execute(
    notebook: Path | str,
    output: Path | str,
    given: dict[str, object] | None = None,
    timeout: float | None = TIMEOUT_S,
    env: dict[str, str] | None = None,
):
    """Run one notebook into `output` and render the page beside it -> kernel.Outcome.

    `given` is validated first (UsageError, nothing launched). timeout in seconds. Folders are
    created; the paths may hold blanks and braces. Raises Stopped on SIGINT and SIGTERM (the partial
    notebook and its page are there, the kernel is not), OSError where nothing can be written.
    """
    notebook, output = Path(notebook).resolve(), Path(output).resolve()
    typed = parameters.validate(notebook, given or {})
    output.parent.mkdir(parents=True, exist_ok=True)
    from rlkernel.pages import kernel, render

    page = output.with_suffix(".html")
    try:
        outcome = kernel.run(notebook, output, typed, timeout, env)
    except kernel.Stopped as stop:
        if output.exists():
            render.page(output, page, name=notebook.stem, error=str(stop))
        raise
    home = "index.html" if (output.parent / INPUTS).exists() else "#"
    render.page(output, page, name=notebook.stem, error=outcome.error, home=home)
    return outcome


def build(
    out: Path | str | None = None,
    force: bool = False,
    only: list[str] | None = None,
    notebooks: Path | str = NOTEBOOKS,
    timeout: float = TIMEOUT_S,
) -> Path:
    """Run every notebook of a folder (or `only` these stems) and write the index -> its path.

    force: measure again and render again, whatever is known. Raises ReportError at the end when a
    notebook failed, UsageError for an unknown stem.
    """
    out = Path(out or records.results_root() / "report").resolve()
    books = _chosen(Path(notebooks), only)
    out.mkdir(parents=True, exist_ok=True)
    known = _read_json(out / INPUTS)
    if not (out / INPUTS).exists():
        (out / INPUTS).write_text("{}\n")
    failures, codes = {}, []
    package = inputs_of_package()  # before anything runs: an edit meanwhile is seen next time
    for number, book in enumerate(books, start=1):
        _say(f"[{number}/{len(books)}] {book.stem} ...", end=" ")
        target = out / book.name
        if (
            not force
            and known.get(book.stem)
            and known[book.stem] == _inputs(book, target, package)
        ):
            _say("unchanged")
            continue
        outcome = execute(book, target, {}, timeout, {"RLKERNEL_FORCE": "1" if force else ""})
        _say(f"{outcome.seconds:.1f} s{' FAILED: ' + outcome.error if outcome.error else ''}")
        if outcome.error:
            failures[book.stem] = outcome.error
            codes.append(outcome.exit_code)
        known[book.stem] = None if outcome.error else _inputs(book, target, package)
        _write_json(out / INPUTS, known)
    index = _index(out, books, failures)
    if failures:
        raise ReportError(index, failures, max(codes))
    return index


def _index(out: Path, books: list[Path], failures: dict[str, str]) -> Path:
    from rlkernel.pages import render

    entries = [
        render.entry(
            out / book.name, name=book.stem, href=f"{book.stem}.html", error=failures.get(book.stem)
        )
        for book in books
    ]
    render.index(entries, out / "index.html")
    return out / "index.html"


def _chosen(folder: Path, only: list[str] | None) -> list[Path]:
    books = sorted(
        p for p in folder.glob("*.ipynb") if not p.name.startswith(".") and ".running" not in p.name
    )
    stems = [p.stem for p in books]
    from rlkernel.experiments.case import UsageError, unknown

    for name in only or ():
        if name not in stems:
            raise UsageError(unknown("notebook", name, stems))
    if not books:
        raise UsageError(f"no notebook in {folder}")
    return [p for p in books if not only or p.stem in only]


def _inputs(book: Path, executed: Path, package: str) -> str:
    """Hash of everything a page is made from; "" where the page is not there."""
    if not executed.exists() or not executed.with_suffix(".html").exists():
        return ""
    whole = hashlib.sha256(book.read_bytes() + package.encode())
    whole.update(json.dumps(records.environment(), sort_keys=True).encode())
    for path in _shown_records(executed):
        whole.update(str(path).encode() + (path.read_bytes() if path.exists() else b"gone"))
    return whole.hexdigest()


def inputs_of_package(package: Path = ROOT / "rlkernel") -> str:
    """Hash of every file of the package that can change a page."""
    whole = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".css", ".j2")):
        whole.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return whole.hexdigest()


def _shown_records(executed: Path) -> list[Path]:
    """The run.json of every record that a page shows, and of every published one."""
    from rlkernel.pages import evidence

    book = json.loads(executed.read_text(encoding="utf-8"))
    outputs = [o for cell in book["cells"] for o in cell.get("outputs", ())]
    metas = [o.get("metadata", {}).get("rlkernel", {}) for o in outputs]
    shown = {m["record"] for m in metas if m.get("record", "").startswith("results/")}
    local = {evidence.located(name) / "run.json" for name in shown}
    return sorted(local | set((committed_root().resolve() / "published").glob("*/*/run.json")))


# ---- command lines -------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """`report [--out DIR] [--only NAME ...] [--force]`"""
    parser = argparse.ArgumentParser(
        prog="python -m rlkernel report", description="Run every notebook and render the pages."
    )
    parser.add_argument("--out", help="folder of the pages (default: results/report)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these notebooks, by stem")
    parser.add_argument("--notebooks", default=NOTEBOOKS, help="folder of the notebooks")
    parser.add_argument("--force", action="store_true", help="measure and render all of it again")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="for each notebook, in seconds"
    )
    asked = parser.parse_args(argv)
    force = asked.force or os.environ.get("FORCE", "") not in ("", "0")

    def work() -> int:
        print(build(asked.out, force, asked.only, asked.notebooks, asked.timeout))
        return 0

    return guarded(work)


def notebook(argv: list[str] | None = None) -> int:
    """`notebook FILE [-p NAME VALUE ...] [-o OUT.ipynb] [--timeout S] [--list]`"""
    parser = argparse.ArgumentParser(
        prog="python -m rlkernel notebook",
        description="Run one notebook with checked parameters and render its page beside it.",
    )
    parser.add_argument("file", help="the notebook")
    parser.add_argument(
        "-p", "--parameter", nargs=2, action="append", metavar=("NAME", "VALUE"), help="set one"
    )
    parser.add_argument("-o", "--output", help="executed notebook (default: results/notebooks/)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="in seconds")
    parser.add_argument("--list", action="store_true", help="only list the parameters")
    asked = parser.parse_args(argv)

    def work() -> int:
        if asked.list:
            print("\n".join(map(str, parameters.read(asked.file).values())))
            return 0
        name = Path(asked.file).name
        output = Path(asked.output or records.results_root() / "notebooks" / name)
        if output.suffix != ".ipynb":
            output = output.with_name(output.name + ".ipynb")
        _say(f"{asked.file} ...", end=" ")
        outcome = execute(asked.file, output, parameters.pairs(asked.parameter), asked.timeout)
        _say(f"{outcome.seconds:.1f} s{' FAILED: ' + outcome.error if outcome.error else ''}")
        print(output.with_suffix(".html"))
        return outcome.exit_code

    return guarded(work)


def guarded(work) -> int:
    """Run `work() -> exit code`; every way to end has its sentence on stderr and its exit code."""
    from rlkernel.experiments.case import UsageError

    before = signal.signal(signal.SIGTERM, _raise)
    try:
        return work()
    except UsageError as error:
        return _fail(str(error), 2)
    except ReportError as error:
        print(error.index)
        return _fail(str(error), error.exit_code)
    except (OSError, records.RecordError) as error:
        return _fail(f"{_why(error)}; earlier results are intact", 3)
    except KeyboardInterrupt:
        return _fail("stopped by SIGINT", 130)
    except SystemExit:
        raise
    except BaseException as error:
        if not hasattr(error, "exit_code"):
            raise
        return _fail(str(error), error.exit_code)
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, _frame) -> None:
    """SIGTERM between two notebooks."""
    print(f"\nstopped by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot write {error.filename or 'a page'}: {error.strerror}"
    return str(error)


def _fail(sentence: str, code: int) -> int:
    print(f"rlkernel: {sentence}", file=sys.stderr)
    return code


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write_json(path: Path, obj: dict) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(obj, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    draft.replace(path)
