"""The pieces of the submission's documents that records fill: tables, figures, boxes, lists.

A template (template/submission/) holds the prose and calls these by name; a number that stands in a
document came through here, and a line names the record that it was read from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from html import escape
from importlib import import_module

from rlkernel.figures import Plot, schedules, style
from rlkernel.figures.schedules import Line
from rlkernel.pages import bars, evidence, raw, required, show
from rlkernel.records import Record

PACKAGE = evidence.PACKAGE
GRADIENTS = ("whole batch backward", "backward")  # the wider check first


class Chapters:
    """Pieces for one set of records. `pieces`: the HTML behind each mark in the text."""

    def __init__(self, found: list[Record]) -> None:
        self.found, self.pieces = found, []
        self.label = required.milestone(found)
        runs = (r for r in found if r.experiment in ("a2a-ffn", "preflight"))
        self.timed = [r for r in runs if any("lines" in row["result"] for row in r.rows)]

    # -- what a template calls ---------------------------------------------------------------------

    def needs(self) -> str:
        """What was asked to be measured: the records that answer it, or a box with the command."""
        body = [
            [need.name, name(r), r.machine_label, held(r)]
            for need in required.NEEDS for r in need.answers(self.found)
        ]  # fmt: skip
        header = ["asked for", "record", "machine", "checks that hold"]
        return self.table(header, body) + self.boxes(required.NEEDS)

    def summary(self) -> str:
        """The answer in a few lines: bits, then what `kernel` gains wherever it was timed."""
        lines = [f"**{held(r)} checks hold** ({name(r)})" for r in self.found]
        for record, line in self.lines():
            if line.schedule == "kernel" and line.speedup:
                where = f"{_workload(line)}, {_state(line)}"
                lines.append(f"**{where}: {_gain(line)}** ({name(record)})")
        return "\n".join(f"- {line}" for line in lines)

    def correctness(self) -> str:
        header = ["record", "workload", "schedule", "checked: differ / of", "whole batch",
                  "gradients: differ / of", "largest relative error"]  # fmt: skip
        body = []
        for record in self.timed:
            for row in record.rows:
                for line in row["result"].get("lines", ()):
                    forward = [_differ(line.get(k)) for k in ("forward", "whole batch")]
                    grads = next((line[k] for k in GRADIENTS if k in line), {})
                    worst = max((g["frobenius"] for g in grads.values()), default=None)
                    workload = _workload(Line(row, line["schedule"], line["chunks"]))
                    body.append([name(record), workload, line["variant"], *forward,
                                 _differ(*grads.values()), style.number(worst, 2)])  # fmt: skip
        return self.table(header, body)

    def throughput(self) -> str:
        """One line a schedule at its best chunk count, in every state of the chip."""
        header = ["record", "workload", "state", "schedule", "median µs", "tokens/s",
                  "TFLOP/s a rank", "FLOPs a rank", "none / it (p10, p90)", "at most",
                  "hidden (p10, p90)", "exposed µs (p10, p90)", "exposed / T comm"]  # fmt: skip
        body = []
        for record, line in self.lines():
            rate = line.timed or line.row["result"]["times"][line.state].get("none", {})
            us = line.us("serial" if line.schedule == "none" else "overlap")
            if us is None or "tokens_per_s" not in rate:
                continue
            body.append([
                name(record), _workload(line), _state(line), line.variant, f"{us:,.1f}",
                f"{rate['tokens_per_s']:,.0f}", style.number(rate["tflops"]),
                f"{rate['flops']:,.0f}",
                schedules.spread(line.speedup, "{:.3f}".format),
                style.number(line.ceiling, 4) if line.schedule != "none" else "-",
                schedules.estimated(line),
                schedules.spread(line.timed.get("exposed_us"), "{:,.1f}".format),
                style.number(line.timed.get("exposed"), 3),
            ])  # fmt: skip
        return self.table(header, body)

    def bars(self) -> str:
        """What the fused kernel is held to, and what the records say of each bar."""
        return self.table(*bars.table(self.found, name))

    def ran(self) -> Iterator[tuple[Record, dict, dict]]:
        """(record, row, line) of every schedule; a preflight has rows of other things, too."""
        for record in self.timed:
            for row in record.rows:
                for line in row["result"].get("lines", ()):
                    yield record, row, line

    def paths(self) -> str:
        """Which way each schedule really went."""
        seen = dict.fromkeys(
            (name(record), line["schedule"], row["case"]["grid"]["dp"], line["path"])
            for record, row, line in self.ran()
        )
        body = [list(map(str, one)) for one in seen]
        return self.table(["record", "schedule", "P", "path that ran"], body)

    def fusion(self) -> str:
        """Did `kernel` run fused? Told of every record."""
        rungs: dict[str, list[str]] = {}
        for record, _, line in self.ran():
            if line["schedule"] == "kernel":
                rungs.setdefault(line["rung"], []).append(name(record))
        told = [f"`{rung}` in {', '.join(dict.fromkeys(where))}" for rung, where in rungs.items()]
        none = "" if "fused" in rungs else " No record here ran the fused kernel."
        return f"What `kernel` was: {'; '.join(told) or 'not run'}.{none}"

    def topology(self) -> str:
        header = ["record", "machine", "ranks", "where they stood", "backend", "bytes moved by"]
        body = []
        for r in self.found:
            paths = {path for row in r.rows for path in row.get("paths", {}).values()}
            moved = {path.partition(" by ")[2] for path in paths}
            ranks = str((r.run.get("topology") or {}).get("world", "-"))
            body.append([name(r), r.machine_label, ranks, required.stands(r), r.run["backend"],
                         ", ".join(sorted(moved - {""})) or "-"])  # fmt: skip
        return self.table(header, body)

    def between(self) -> str:
        """One host against several nodes; a box for each kind of nodes that nobody measured."""
        header = ["record", "where", "workload", "T wire µs", "T comm µs", "T comp / T comm",
                  "schedule", "none / it (p10, p90)", "hidden (p10, p90)",
                  "of what could be hidden: times", "traces"]  # fmt: skip
        body = []
        for record, line in self.lines():
            if line.speedup and line.balance:
                gain = schedules.spread(line.speedup, "{:.3f}".format)
                body.append([
                    name(record), required.stands(record), f"{_workload(line)}, {_state(line)}",
                    f"{line.us('wire'):,.1f}", f"{line.us('comm'):,.1f}", f"{line.balance:.2f}",
                    line.variant, gain, schedules.estimated(line),
                    *(schedules.reached(line, way) for way in ("time", "trace")),
                ])  # fmt: skip
        return self.table(header, body) + self.boxes(required.NODES)

    def bottlenecks(self) -> str:
        """What the length of each traced schedule hangs on, the largest shares of its path."""
        lines = []
        for record, line in self.lines(seen=True):
            spent = line.slowest["critical"]
            whole = sum(spent.values())
            most = sorted(spent.items(), key=lambda item: -item[1])[:3]
            told = ", ".join(f"{us / whole:.0%} {schedules.KINDS[kind][0]}" for kind, us in most)
            where = f"{line.variant}, {_workload(line)}"
            lines.append(f"- {where}: {told} of {whole:,.0f} µs ({name(record)})")
        return "\n".join(lines)

    def scaling(self) -> str:
        header = ["record", "P", "workload", "state", "schedule", "tokens/s", "tokens/s a rank",
                  "none / it (p10, p90)"]  # fmt: skip
        body = []
        for record, line in sorted(self.lines(), key=lambda pair: pair[1].ranks):
            rate = line.timed or line.row["result"]["times"].get(line.state, {}).get("none", {})
            if "tokens_per_s" in rate and line.schedule in ("none", "kernel"):
                each = rate["tokens_per_s"] / line.ranks
                body.append([
                    name(record), str(line.ranks), _workload(line), _state(line), line.variant,
                    f"{rate['tokens_per_s']:,.0f}", f"{each:,.0f}",
                    schedules.spread(line.speedup, "{:.3f}".format),
                ])  # fmt: skip
        wanted = [n for n in required.NEEDS if "scale" in n.command or "eight" in n.name]
        return self.table(header, body) + self.boxes(wanted)

    def limitations(self) -> str:
        """What the records say of themselves, and what nobody measured."""
        told = [line for r in self.timed for line in r.run.get("not_covered", ())]
        told += [f"not measured: {n.name}" for n in required.NEEDS if not n.answers(self.found)]
        told += [f"{name(r)}: its raw samples were too many to publish"
                 for r in self.timed if not raw.covers(r)]  # fmt: skip
        told.append("the supplied check sees min(B, 2) rows; the whole batch is checked apart, on "
                    "the shapes and seeds of these records only")  # fmt: skip
        return "\n".join(f"- {line}" for line in dict.fromkeys(told))

    def unsuccessful(self) -> str:
        """The log of the schedules, and of the kernels' what is about this layer."""
        own, others = (
            (PACKAGE / name / "LOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
            for name in ("overlap", "kernels")
        )
        ours = [part for part in others if "A2A" in part.partition("\n")[0]]
        return "\n\n".join(f"### {part}" for part in own + ours)

    def words(self, *files: str) -> str:
        """What modules say of themselves; one that is not part of this tree is left out."""
        there = [file for file in files if (PACKAGE / file).is_file()]
        told = {f: ast.get_docstring(ast.parse((PACKAGE / f).read_text("utf-8"))) for f in there}
        return "\n\n".join(f"`rlkernel/{f}`\n\n```text\n{text}\n```" for f, text in told.items())

    def figures(self, which: str, experiment: str = "a2a-ffn") -> str:
        """That drawing of every record that has what it shows."""
        others = [r for r in self.found if r.experiment == experiment]
        found = self.timed if experiment == "a2a-ffn" else others
        if not found:
            return ""
        drawings = import_module(f"rlkernel.figures.{experiment.replace('-', '_')}")
        plot: Plot = getattr(drawings, which)
        shown = [r for r in found if plot.table(r.rows)[0] != show.LACKS]
        where = "{}, <code>{}</code>".format
        return "".join(
            self.piece(show.figure_html(plot, r.rows, where(escape(r.machine_label), place(r))))
            for r in shown
        )

    def records(self) -> str:
        header = ["record", "machine", "measured", "source", "raw samples", "command"]
        body = [
            [place(r), r.machine_label, r.run.get("finished", "")[:16].replace("T", " "),
             r.source[:8], _samples(r), " ".join(r.run["argv"])]
            for r in self.found
        ]  # fmt: skip
        return self.table(header, body)

    # -- small things ------------------------------------------------------------------------------

    def lines(self, seen: bool = False) -> list[tuple[Record, Line]]:
        """Every schedule at its best chunk count, in every state; `seen`: those in a trace."""
        found = []
        for record in self.timed:
            every = schedules.lines(record.rows, not seen)
            there = [line for line in every if (line.seen if seen else line.times)]
            found += [(record, line) for line in schedules.best(there)]
        return found

    def table(self, header: list[str], body: list[list[str]]) -> str:
        return self.piece(show.table_html(header, body)) if body else ""

    def boxes(self, wanted: Iterable[required.Need]) -> str:
        """The gaps among these, in one box; "" where each has its record."""
        gaps = [need for need in wanted if not need.answers(self.found)]
        told = "".join(
            f"<p><strong>NOT MEASURED: {escape(need.name)}</strong></p>"
            f'<pre class="rk-scroll">{escape(need.command)}</pre>'
            for need in gaps
        )
        return self.piece(f'<div class="rk-gap">{told}</div>') if gaps else ""

    def piece(self, html: str) -> str:
        self.pieces.append(html)
        return f"\n\nPIECE{len(self.pieces) - 1}OF\n\n"


def name(record: Record) -> str:
    return f"{record.experiment}/{record.path.name}"


def place(record: Record) -> str:
    """The record's folder inside the ZIP."""
    return f"results/published/{name(record)}"


def held(record: Record) -> str:
    """`33 of 33`"""
    found = checks(record)
    return f"{sum(check['passed'] for check in found)} of {len(found)}"


def checks(record: Record) -> list[dict]:
    return (record.run.get("verdict") or {}).get("checks", [])


def _samples(record: Record) -> str:
    if record.samples:
        return f"{len(record.samples):,}"
    return "too many to publish" if record.run.get("samples_left_out") else "nothing timed"


def _workload(line: Line) -> str:
    at = line.row["case"]["parameters"]
    scales = {"comm-scale": at.get("comm_scale", 1), "compute-scale": at.get("compute_scale", 1)}
    more = [f"{scale} {value}" for scale, value in scales.items() if value != 1]
    return ", ".join([line.where, line.direction, *more])


def _state(line: Line) -> str:
    cpu = line.row.get("device") == "cpu"
    return "CPU" if cpu else line.state or "-"


def _differ(*told: dict | None) -> str:
    """`0 / 4,096` elements, added up."""
    there = [one for one in told if one]
    if not there:
        return "-"
    return f"{sum(t['mismatches'] for t in there):,} / {sum(t['elements'] for t in there):,}"


def _gain(line: Line) -> str:
    ratio, exposed = line.speedup, line.timed.get("exposed")
    told = f"none / {line.variant} = {ratio['median']:.3f} of at most {line.ceiling:.3f}"
    told += f", hidden {schedules.estimated(line)} of T comm by the estimate"
    return told + (f", {exposed:.2f} exposed" if exposed is not None else "")
