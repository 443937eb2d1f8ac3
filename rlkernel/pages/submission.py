"""`python -m rlkernel submission`: what the overlap question asks to be handed in, from records.

    results/submission/
        proposal.html    what is built, why, and how it is judged: a plan, no measurement
        report.html      what was measured: every number with its record
        a2a-ffn.zip      code, README, configurations, correctness logs, raw timings, traces
        SHA256SUMS       of the three

What goes in: every published record of the question, and one of this machine, the demo, which is
measured now unless it is known. A record that is older than the code, or whose times its own raw
samples do not give, ends this with exit code 1, its name and the command that measures it anew;
what lies in the folder already stays. --without-stale leaves the first kind out instead, and the
documents name what was left out. What no record holds is a NOT MEASURED box with the command
that fills it: nothing is refused for being absent.

Exit codes: 0 written, 1 a record was refused, 2 bad usage, 3 a rank of the demo crashed or nothing
can be written, 4 the demo is out of time, 128+n a signal.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jinja2
from nbconvert.filters import markdown2html

import rlkernel
from rlkernel import records
from rlkernel.pages import bundle, chapters, costs, evidence, render, report, required
from rlkernel.pages.chapters import Chapters
from rlkernel.records import Record
from rlkernel.records.publish import publish
from rlkernel.records.store import RUN, write_json

ZIP = "a2a-ffn.zip"
MAPPING = "## The A2A-FFN benchmark's commands"  # of env/README.md
DEMO = "demo-of-this-submission"  # its name among the published ones
TIMEOUT_S = 600.0


class Refused(RuntimeError):
    """Records that may not be handed in, a sentence each."""

    exit_code = 1


def build(
    out: Path | str | None = None, timeout_s: float = TIMEOUT_S, without_stale: bool = False
) -> Path:
    """Write the submission -> its folder. timeout_s: of the demo. without_stale: leave out what is
    older than the code, and say so. Raises Refused.
    """
    out = Path(out or records.results_root() / "submission").resolve()
    found = required.published()
    left = [record for record in found if without_stale and evidence.is_stale(record)]
    found = [record for record in found if record not in left]
    if said := required.refused(found):
        raise Refused("not handed in:\n" + "\n".join(said))
    demo = evidence.get("a2a-ffn", demo=True, trace=True, timeout_s=timeout_s).local
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".submission-", dir=out.parent))
    try:
        found.append(_copied(demo, draft / "demo"))
        written = {"proposal.html": _document("proposal", found, left).encode()}
        written["report.html"] = _document("report", found, left).encode()
        new = draft / "new"
        new.mkdir()
        bundle.packed(new / ZIP, _files(found))
        written[ZIP] = (new / ZIP).read_bytes()
        for name, data in {**written, bundle.SUMS: bundle.sums(written)}.items():
            (new / name).write_bytes(data)
        shutil.rmtree(out, ignore_errors=True)
        new.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


def _copied(demo: Record, root: Path) -> Record:
    """The demo as it would be published, dated by itself: equal records, equal bytes."""
    path = publish(demo.path, DEMO, root=root)
    copy = records.read(path)
    write_json(path / RUN, copy.run | {"published": copy.run["finished"]})
    return records.read(path)


# ---- documents -----------------------------------------------------------------------------------


def _document(name: str, found: list[Record], left: Sequence[Record] = ()) -> str:
    """One self-contained page."""
    told = Chapters(found)
    body = markdown2html(_text(name, told))
    parts = re.split(r"<p>PIECE(\d+)OF</p>", body)
    parts[1::2] = [told.pieces[int(number)] for number in parts[1::2]]
    parts[::2] = [f'<section class="prose">{prose}</section>' for prose in parts[::2]]
    ended = sorted(r.run["finished"][:10] for r in found)
    note = f"Measured from {ended[0]} to {ended[-1]}." if told.pieces else "No number is measured."
    title = re.search(r"<h1[^>]*>(.*?)<", body, re.S)[1]
    if left:
        names = ", ".join(f"{r.experiment}/{r.path.name}" for r in left)
        note += f" Left out, since the code has changed since they were measured: {names}."
    template = _templates().get_template("document.html.j2")
    return template.render(
        title=title, name=name, body="\n".join(parts), note=note, css=render.css(),
        version=rlkernel.__version__,
    )  # fmt: skip


def _text(name: str, told: Chapters, **more: str) -> str:
    """A template's Markdown; every method of Chapters is a word of it."""
    methods = {word: getattr(told, word) for word in dir(told) if not word.startswith("_")}
    label = f"**{told.label}.**" if told.label else ""
    template = _templates().get_template(f"submission/{name}.md.j2")
    return template.render({**methods, "label": label, "sums": bundle.SUMS, **more})


def _templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(render.TEMPLATE)
    return jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )


# ---- the ZIP -------------------------------------------------------------------------------------


def _files(found: list[Record]) -> dict[str, bytes]:
    files = bundle.tree(report.ROOT)
    for record in found:
        for path in sorted(p for p in record.path.rglob("*") if p.is_file()):
            inside = path.relative_to(record.path).as_posix()
            files[f"{chapters.place(record)}/{inside}"] = path.read_bytes()
        files[f"configurations/{chapters.name(record)}.json"] = _json(_configuration(record))
        files[f"correctness/{chapters.name(record)}.txt"] = _log(record).encode()
    from rlkernel.experiments import matrix

    files["configurations/matrix.json"] = _json([asdict(one) for one in matrix.FULL])
    files["README.md"] = _readme(found).encode()
    return files


def _readme(found: list[Record]) -> str:
    page = (report.ROOT / "env" / "README.md").read_text(encoding="utf-8")
    mapping = page.partition(MAPPING)[2].partition("\n## ")[0].strip()
    heads = ["record", "machine", "checks that hold", "command"]
    body = [
        [f"`{chapters.place(record)}`", record.machine_label, chapters.held(record),
         f"`{' '.join(record.run['argv'])}`"]
        for record in found
    ]  # fmt: skip
    lines = costs.markdown(heads, body)
    return _text("README", Chapters(found), mapping=mapping, records="\n".join(lines))


def _configuration(record: Record) -> dict:
    told = ("argv", "parameters", "protocol", "topology", "environment", "backend", "device")
    return {name: record.run.get(name) for name in told}


def _log(record: Record) -> str:
    """The checks of a record as text: what was asked, on what, each value and its limit."""
    run = record.run
    head = [f"$ {' '.join(run['argv'])}", f"{record.machine_label}, {run['backend']}, torch "
            f"{run['environment']['torch']}, NCCL {run['environment']['nccl']}, source "
            f"{record.source[:8]}, {run['finished']}", ""]  # fmt: skip
    body = [
        f"{'holds ' if check['passed'] else 'FAILED'}  {check['name']}: {check['value']} "
        f"(limit: {check['limit']})"
        for check in chapters.checks(record)
    ]
    return "\n".join([*head, *body, "", f"exit code {run['exit_code']}", ""])


def _json(obj: object) -> bytes:
    return (json.dumps(obj, indent=1) + "\n").encode()


def main(argv: list[str] | None = None) -> int:
    """`submission [--out DIR] [--timeout S] [--without-stale]`"""
    parser = argparse.ArgumentParser(
        prog="python -m rlkernel submission", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", help="the folder, replaced as a whole (results/submission)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="of the demo, in seconds")
    parser.add_argument(
        "--without-stale", action="store_true", help="leave stale records out, and name them"
    )
    asked = parser.parse_args(argv)

    def work() -> int:
        print(build(asked.out, asked.timeout, asked.without_stale))
        return 0

    return report.guarded(work)
