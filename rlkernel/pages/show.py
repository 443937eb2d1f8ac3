"""What a notebook displays: each piece is one HTML fragment, readable with and without our pages.

Every number comes from a record, so every piece says which one, from which machine, and whether the
code has changed since. Pieces carry their kind in the output's metadata; the index reads it.
"""

from __future__ import annotations

import ast
import base64
import os
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from IPython.display import display

from rlkernel.figures import Plot, style
from rlkernel.pages.evidence import Evidence, covered, is_stale, not_covered, place
from rlkernel.records import Record, environment, label

CARDS = Path(__file__).parent / "template" / "cards.css"
WIDE = 8  # columns; with more they stand closer
OPEN_ROWS = 12  # a longer table starts closed
LACKS = ["not measured"]  # the header of a table of rows that hold nothing of it
COMPUTED = "Computed here as this page was made, on the CPU; no record holds it."
DPI, COLOURS = 160, 256  # 1.6 dots a CSS pixel, a palette: forty figures stay below two megabytes
SHORT, LONG = 20, 80  # characters: a cell with more wraps; with many more it is a sentence


def headless() -> bool:
    """Whether nobody sits in front of it (report, papermill) and only what is drawn is seen."""
    return os.environ.get("RLKERNEL_HEADLESS", "") not in ("", "0")


def start() -> None:
    """The look of the pieces; call it once at the top of a notebook. Pages bring it themselves."""
    if not headless():
        _emit(f"<style>{CARDS.read_text()}</style>", "")


def figure(
    plot: Plot, evidence: Evidence, *, main: bool = False, rows=None, gap: bool = True
) -> None:
    """The drawing of each record with its text alternative, source and table.

    main: the index shows this one. rows: a subset instead of all rows, as a function of a record.
    gap: with a word where nothing was measured here; false where it stands already. A published
    record that lacks what is drawn is left out where another one has it.
    """
    if gap:
        missing(evidence)
    told = [(record, rows(record) if rows else record.rows) for record in evidence.records]
    lacking = [r is not evidence.local and plot.table(c)[0] == LACKS for r, c in told]
    for record, chosen in [one for one, lacks in zip(told, lacking) if not lacks] or told[:1]:
        _emit(
            figure_html(plot, chosen, sources(record, record is evidence.local)),
            plot.alt(chosen),
            kind="figure",
            main=main,
            record=place(record),
        )


def together(
    plot: Plot, evidences: Iterable[Evidence], *, main: bool = False, gap: bool = True
) -> None:
    """One drawing of the rows of several records, each named under it; gaps stand above it.

    gap: with a word where nothing was measured here; false where it stands already.
    """
    found = list(evidences)
    for one in found:
        if gap:
            missing(one)
    records = [(one.records[0], one.local is not None) for one in found if one.records]
    chosen = [row for record, _ in records for row in record.rows]
    if not chosen:
        return
    _emit(
        figure_html(plot, chosen, "; ".join(sources(r, here) for r, here in records)),
        plot.alt(chosen),
        kind="figure",
        main=main,
        record=place(records[0][0]),
    )


def listing(path: Path | str, *names: str) -> None:
    """Source code to read: the whole file, or only these functions and classes of it."""
    text = Path(path).read_text(encoding="utf-8")
    if names:
        nodes = [n for n in ast.parse(text).body if getattr(n, "name", "") in names]
        text = "\n\n\n".join(ast.get_source_segment(text, node) for node in nodes)
    _emit(f'<pre class="rk-scroll">{escape(text)}</pre>', text, kind="listing")


def drawing(plot: Plot, evidence: Evidence | None = None) -> None:
    """A drawing that explains rather than measures; shapes come from the first record, if any."""
    chosen = rows(evidence) if evidence else []
    source = evidence.records[0] if evidence and evidence.records else None
    told = sources(source, source is evidence.local) if source else ""
    _emit(figure_html(plot, chosen, told), plot.alt(chosen), kind="drawing")


def computed(plot: Plot, rows) -> None:
    """The drawing of rows that no record holds: computed while the page was made."""
    _emit(figure_html(plot, rows, COMPUTED), plot.alt(rows), kind="drawing")


def model(plot: Plot, rows, evidences: Iterable[Evidence], terms: str) -> None:
    """The drawing of what a model says, never a measurement. terms: what it is made of, in words;
    evidences: the records that it was made from, the first one of each.
    """
    used = {place(r): sources(r, r is one.local) for one in evidences for r in one.records[:1]}
    origin = f"<strong>Model</strong> ({escape(terms)}), made from: {'; '.join(used.values())}"
    _emit(figure_html(plot, rows, origin), plot.alt(rows), kind="model")


def no_model(why: str) -> None:
    """The visible gap where records do not determine a model."""
    said = f"NO MODEL here: {why}"
    _emit(f'<div class="rk-gap"><strong>{escape(said)}</strong></div>', said, kind="gap")


def rows(evidence: Evidence) -> list[dict]:
    """The rows of the first record: the local one where there is one."""
    return evidence.records[0].rows if evidence.records else []


def topology(evidence: Evidence) -> None:
    """Where the ranks of a record stood and what moved their bytes."""
    missing(evidence)
    if not evidence.records:
        return
    record = evidence.records[0]
    run, places = record.run, record.run.get("topology", {})
    facts = {"backend": run.get("backend"), "device": run.get("device"), **places}
    paths = dict.fromkeys(p for row in record.rows for p in row.get("paths", {}).values())
    body = [[name.replace("_", " "), str(value)] for name, value in facts.items()]
    body += [["path", path] for path in paths]
    table(evidence, ["fact", "value"], body)


def table(evidence: Evidence, header: list[str], body: list[list[str]], caption: str = "") -> None:
    """A table with the source of its numbers under it; nothing where there is no number."""
    if not body:
        return
    first = next(iter(evidence.records), None)
    source = sources(first, first is evidence.local) if first else ""
    _emit(
        f'<div class="rk-card">{table_html(header, body)}'
        f'<p class="rk-source">{escape(caption)} {source}</p></div>',
        "\n".join("  ".join(line) for line in [header, *body]),
        kind="table",
    )


def verdict(evidence: Evidence, title: str) -> None:
    """Passed or failed, each check with its value and limit; one block a record."""
    missing(evidence)
    for record in evidence.records:
        found = record.run.get("verdict") or {}
        passed = bool(found.get("passed"))
        checks = [
            ["holds" if c["passed"] else "FAILS", c["name"], _text(c["value"]), _text(c["limit"])]
            for c in found.get("checks", ())
        ]
        head = f'<p class="rk-line">{pill(passed)} <strong>{escape(title)}</strong></p>'
        numbers = _details(["", "check", "value", "limit"], checks, "check")
        source = f'<p class="rk-source">{sources(record, record is evidence.local)}</p>'
        _emit(
            f'<div class="rk-card">{head}{numbers}{source}</div>',
            f"{title}: {'passed' if passed else 'failed'}",
            kind="verdict",
            title=title,
            passed=passed,
            machine=record.machine_label,
            local=record is evidence.local,
            stale=is_stale(record),
            record=place(record),
        )


def coverage(evidence: Iterable[Evidence] | Evidence) -> None:
    """COVERED as the first record of each evidence says it; NOT COVERED what all of them leave
    open, published ones as well. Where an experiment has parts, which of them were measured stands
    below: its lists speak of all.
    """
    all_of = [evidence] if isinstance(evidence, Evidence) else list(evidence)
    told = [r for e in all_of for r in e.records[:1]]
    lacking = not_covered(r for e in all_of for r in e.records)
    columns = ""
    for name, key, lines in (("COVERED", "covered", covered(told)),
                             ("NOT COVERED", "not_covered", lacking)):  # fmt: skip
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        columns += f'<div class="rk-{key}"><h4>{name}</h4><ul>{items}</ul></div>'
    parts = dict.fromkeys(part for r in told for part in _parts(r.run))
    note = f'<p class="rk-source">Parts that were measured: {escape(", ".join(parts))}.</p>'
    _emit(
        f'<div class="rk-coverage">{columns}</div>{note if parts else ""}',
        "COVERED / NOT COVERED", kind="coverage",
    )  # fmt: skip


def _parts(run: dict) -> list[str]:
    cases = [case["parameters"] for case in run.get("cases", ())]
    return [at["what"] for at in cases if "what" in at]


def missing(evidence: Evidence) -> None:
    """Nothing where it was measured here; a line where a published record stands below; else the
    visible gap: what it needs and the command that fills it.
    """
    if evidence.local is not None:
        return
    if evidence.published:
        where = ", ".join(dict.fromkeys(r.machine_label for r in evidence.published))
        said = f"Measured on {where}, below; here: {evidence.missing}."
        _emit(f'<p class="rk-source">{escape(said)}</p>', said, kind="elsewhere")
        return
    _emit(
        '<div class="rk-gap"><strong>NOT MEASURED here: '
        f"{escape(evidence.missing)}</strong><p>On such a machine:</p>"
        f'<pre class="rk-scroll">{escape(evidence.command)}</pre></div>',
        f"NOT MEASURED here: {evidence.missing}\n{evidence.command}",
        kind="gap",
    )


def command(line: str) -> None:
    """A command to copy."""
    _emit(f'<pre class="rk-scroll">{escape(line)}</pre>', line, kind="command")


def machine() -> None:
    """This machine in a table: what can change a number."""
    facts = environment()
    gpus = ", ".join(f"{g['name']} ({g['driver']})" for g in facts["gpus"]) or "none"
    body = [[n, str(v if v is not None else "absent")] for n, v in facts.items() if n != "gpus"]
    _emit(
        f'<div class="rk-card">{table_html(["fact", label(facts)], [*body, ["gpus", gpus]])}</div>',
        label(facts),
        kind="machine",
        machine=label(facts),
    )


# ---- fragments -----------------------------------------------------------------------------------


def figure_html(plot: Plot, rows, origin: str = "") -> str:
    """One <figure>: picture, caption with its origin (a fragment of HTML), table."""
    source = f'<span class="rk-source">{origin}</span>' if origin else ""
    said = f"<strong>{escape(plot.title)}</strong> {escape(plot.note)} {source}"
    return (
        '<figure class="rk-figure"><div class="rk-scroll rk-plot" tabindex="0">'
        f"{image_html(plot, rows)}</div>"
        f"<figcaption>{said}</figcaption>"
        f"{_details(*plot.table(rows), 'line')}</figure>"
    )


def image_html(plot: Plot, rows) -> str:
    """The drawing alone, with its text alternative."""
    drawn = plot.draw(rows)
    width, height = (round(98 * inches) for inches in drawn.get_size_inches())
    data = base64.b64encode(style.png(drawn, dpi=DPI, colours=COLOURS)).decode()
    return (
        f'<img src="data:image/png;base64,{data}" alt="{escape(plot.alt(rows))}" '
        f'width="{width}" height="{height}" style="max-width:{width}px">'
    )


def table_html(header: list[str], body: list[list[str]]) -> str:
    """A table that scrolls within itself; columns of numbers are set to the right."""
    right = [bool(body) and all(_numeric(line[i]) for line in body) for i in range(len(header))]
    cell = "<{0}{1}>{2}</{0}>".format
    mark = [' class="n"' if r else "" for r in right]
    wide = ' class="wide"' if len(header) > WIDE else ""
    head = "".join(cell("th", m, escape(h)) for m, h in zip(mark, header, strict=True))
    lines = ""
    for line in body:
        cells = zip(mark, map(str, line), strict=True)
        lines += f"<tr>{''.join(cell('td', m or _long(c), escape(c)) for m, c in cells)}</tr>"
    return (
        f'<div class="rk-scroll" tabindex="0"><table{wide}>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def pill(passed: bool | None) -> str:
    word, kind = {True: ("holds", "good"), False: ("fails", "bad"), None: ("not run", "none")}[
        passed
    ]
    return f'<span class="rk-pill rk-{kind}">{word}</span>'


def _details(header: list[str], body: list[list[str]], unit: str) -> str:
    if not body:
        return ""
    state = " open" if len(body) <= OPEN_ROWS else ""
    count = f"{len(body)} {unit}{'s' * (len(body) != 1)}"
    return (
        f'<details class="rk-numbers"{state}><summary>Table, {count}</summary>'
        f"{table_html(header, body)}</details>"
    )


def sources(record: Record, local: bool = True) -> str:
    """Where numbers come from, as a fragment: here or published, machine, folder, age."""
    stale = ' <span class="rk-pill rk-stale">stale: the code has changed since</span>'
    return (
        f"{'Measured here' if local else 'Published'}, {escape(record.machine_label)}, "
        f"<code>{escape(place(record))}</code>{stale if is_stale(record) else ''}"
    )


def _long(text) -> str:
    length = len(str(text))
    return ' class="long"' if length > LONG else ' class="words"' if length > SHORT else ""


def _numeric(text: str) -> bool:
    return bool(re.fullmatch(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?|-", str(text)))


def _text(value) -> str:
    return style.number(value) if isinstance(value, int | float) else str(value)


def _emit(html: str, text: str, **meta) -> None:
    display({"text/html": html, "text/plain": text}, raw=True, metadata={"rlkernel": meta})
