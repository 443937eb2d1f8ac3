"""An executed notebook -> one HTML file without any request to anywhere, and the index over them.

The template is our own: prose and figures first, code folded away, no script at all. Equal input
gives an equal page but for the text of its one <time> element.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape, unescape
from pathlib import Path

import jinja2
import nbformat
from nbconvert.exporters import HTMLExporter

import rlkernel
from rlkernel import records
from rlkernel.pages import evidence, show, stories
from rlkernel.records.scrub import scrub

TEMPLATE = Path(__file__).parent / "template"
NEWEST = 12  # records listed on the index, an experiment


@dataclass
class Entry:
    """What the index says of one notebook."""

    name: str
    href: str
    title: str
    question: str
    error: str | None = None
    machine: str = ""
    verdicts: list[dict] = field(default_factory=list)
    gaps: int = 0
    figure: dict | None = None
    experiments: set[str] = field(default_factory=set)


def page(executed: Path, target: Path, *, name: str, error: str | None, home: str = "#") -> None:
    """Render an executed notebook to `target`. home: the address of the index from there."""
    book = nbformat.read(executed, as_version=4)
    book.cells = [cell for cell in book.cells if not _papermill_remark(cell)]
    for output in (o for cell in book.cells for o in cell.get("outputs", ())):
        if output.output_type == "error":  # tracebacks name files of this machine
            output.traceback = [scrub(line) for line in output.traceback]
    exporter = HTMLExporter(template_name="rlkernel", extra_template_basedirs=[str(TEMPLATE)])
    exporter.anchor_link_text = "#"
    title, _ = heading(book)
    facts = {"title": title, "name": name, "error": error, "home": home, **_common()}
    html, _ = exporter.from_notebook_node(book, {"rlkernel": facts})
    _write(target, html)


def index(entries: list[Entry], target: Path) -> None:
    """The front page: three questions with verdict, figure, machines and limits, each with its
    pages; whatever belongs to none of them; the records.
    """
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATE))
    template = environment.get_template("front.html.j2")
    told = [(story, _picture(story), [e for e in entries if _of(e, story)])
            for story in stories.told()]  # fmt: skip
    others = [e for e in entries if not any(_of(e, story) for story, *_ in told)]
    _write(target, template.render(
        told=told, others=others, records=record_table(), sources=show.sources,
        is_local=_is_local, **_common(),
    ))  # fmt: skip


def _of(entry: Entry, story: stories.Story) -> bool:
    return bool(entry.experiments & set(story.experiments))


def _picture(story: stories.Story) -> str:
    """The story's drawing as an <img>; "" where no record can be drawn."""
    return show.image_html(story.plot, story.shown.rows) if story.shown else ""


def _is_local(record) -> bool:
    return record.path.parent.parent.name != "published"


def entry(executed: Path, *, name: str, href: str, error: str | None) -> Entry:
    """Read the index's facts from the pieces that the notebook displayed."""
    book = nbformat.read(executed, as_version=4)
    title, question = heading(book)
    found = Entry(name, href, title, question, error, records.label(records.environment()))
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            meta = output.get("metadata", {}).get("rlkernel", {})
            found.experiments |= _experiment(meta.get("record", ""))
            if meta.get("kind") == "verdict":
                found.verdicts.append(dict(meta))
            elif meta.get("kind") == "gap":
                found.gaps += 1
            elif meta.get("kind") == "figure" and (meta.get("main") or found.figure is None):
                if not (found.figure or {}).get("main"):
                    found.figure = {**_image(output.data["text/html"]), "main": meta.get("main")}
    return found


def _experiment(place: str) -> set[str]:
    """Whose record a piece shows: results/[published/]<experiment>/<name>."""
    parts = place.removeprefix("results/").removeprefix("published/").split("/")
    return {parts[0]} if len(parts) == 2 else set()


def heading(book) -> tuple[str, str]:
    """(title, question): the first `# line` of a notebook and its first `> quotation`."""
    prose = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    title = re.search(r"^# (.+)$", prose, re.M)
    quoted = re.search(r"^> (.+(?:\n> .+)*)", prose, re.M)
    question = quoted.group(1).replace("\n> ", " ") if quoted else ""
    return (title.group(1).strip() if title else "Untitled"), question


def record_table() -> str:
    """The newest records beside the pages as HTML: status, verdict, whether stale; "" for none."""
    lines = []
    home = records.results_root()
    names = sorted(p.name for p in home.iterdir()) if home.is_dir() else []
    for name in names:
        for record in records.find(name)[:NEWEST]:
            lines.append([name, _state(record), record.machine_label, evidence.place(record)])
    header = ["experiment", "status", "machine", "record"]
    return show.table_html(header, lines) if lines else ""


def _state(record) -> str:
    passed = "" if record.status != "ok" else ", holds" if record.passed else ", fails"
    return f"{record.status}{passed}{', stale' if evidence.is_stale(record) else ''}"


def _image(html: str) -> dict:
    found = re.search(r'<img src="([^"]+)" alt="([^"]*)" width="(\d+)" height="(\d+)"', html)
    keys = ("src", "alt", "width", "height")
    return (
        {**dict(zip(keys, found.groups(), strict=True)), "alt": unescape(found.group(2))}
        if found
        else {}
    )


def _papermill_remark(cell) -> bool:
    tags = cell.metadata.get("tags", ())
    return "papermill-error-cell-tag" in tags


def css() -> str:
    """The look of every page."""
    return "".join((TEMPLATE / n).read_text(encoding="utf-8") for n in ("cards.css", "page.css"))


def _common() -> dict:
    return {
        "css": css(),
        "version": rlkernel.__version__,
        "machine": records.label(records.environment()),
        "built": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def _write(target: Path, html: str) -> None:
    """Replace the page as a whole: a reader never sees half of one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.new")
    draft.write_text(html, encoding="utf-8")
    draft.replace(target)


def failed_page(target: Path, *, name: str, error: str) -> None:
    """A page for a notebook of which nothing can be shown."""
    _write(
        target,
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title>'
        f'<link rel="icon" href="data:,"><style>{css()}</style><body class="rk-page"><main>'
        f'<h1>{escape(name)}</h1><div class="banner">{escape(error)}</div></main></body></html>',
    )
