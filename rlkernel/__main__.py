"""The one command line: `python -m rlkernel <experiment> [flags]`, and what makes pages of records.

Flags are made from each experiment's Params, so a new experiment needs nothing here. torch is
imported by the launched ranks only.

Exit codes: 0 all checks hold, 1 a check failed (or nothing could be measured here), 2 bad usage
(nothing launched, or a rank refused what it was given), 3 a rank crashed or the record cannot be
written, 4 timed out, 128+n a signal.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import signal
import sys
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from rlkernel.experiments import registry as experiments
from rlkernel.experiments.case import UsageError, bare_flags, describe, parse_params, unknown
from rlkernel.records.store import Record, RecordError

EXIT_CODES = """\
exit codes
  0  all checks hold          3  a rank crashed, or the record cannot be written
  1  a check failed           4  not finished in time
  2  bad usage                128+n  ended by signal n (130 Ctrl-C, 143 TERM)
"""
COMMANDS = {
    "report": "run the notebooks and render results/report/index.html",
    "notebook": "run one notebook with parameters and render it",
    "sweep": "run a grid of parameters from a YAML file, resumable",
    "publish": "copy a finished run into results/published, scrubbed",
    "refresh": "measure published records anew, each by its own command",
    "submission": "hand in the overlap question: documents and a ZIP, from fresh records",
    "readme": "write the README's block of numbers anew from published records",
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    # Not the default, so that a launch that is ended can say so before this process ends.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code = dispatch(argv)
        sys.stdout.flush()  # while a reader who has gone can still be noticed
        return code
    except UsageError as error:
        print(f"rlkernel: {error}", file=sys.stderr)
        return 2
    except RecordError as error:
        print(f"rlkernel: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `... | head`: at exit nothing may be flushed to who has gone
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name in COMMANDS:
        return _COMMANDS[name](rest)
    return run_experiment(name, rest, argv)


def overview() -> str:
    """What `python -m rlkernel --help` prints."""
    lines = ["usage: python -m rlkernel <experiment or command> [flags]", "", "experiments"]
    modules = {name: experiments.load(name) for name in experiments.NAMES}
    width = max(map(len, [*modules, *COMMANDS])) + 2
    lines += [f"  {name:<{width}}{module.SUMMARY}" for name, module in modules.items()]
    lines += ["", "commands"]
    lines += [f"  {name:<{width}}{text}" for name, text in COMMANDS.items()]
    lines += ["", "Each explains its flags: python -m rlkernel tp-swiglu --help", "", EXIT_CODES]
    return "\n".join(lines).rstrip()


# -- experiments -------------------------------------------------------------------------------


def run_experiment(name: str, rest: list[str], argv: list[str]) -> int:
    module = _load(name)
    options, params = asked(name, module, rest)
    from rlkernel.run.launch import RunError, measure

    try:
        record, problem = (
            measure(
                name,
                params,
                root=options.results,
                force=options.force,
                timeout_s=options.timeout,
                peer_timeout_s=options.peer_timeout,
                argv=["python", "-m", "rlkernel", *argv],
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            ),
            None,
        )
    except RunError as error:
        record, problem = error.record, error
    if problem is not None:
        print(f"rlkernel: {problem}", file=sys.stderr)
    code = problem.exit_code if problem else record.exit_code
    show = _print_json if options.json else _print_text
    show(module, params, record, code)
    return code


def asked(name: str, module: ModuleType, words: list[str]) -> tuple[argparse.Namespace, object]:
    """(all that was typed, the experiment's own parameters); UsageError for what cannot be."""
    words = bare_flags(module.Params, words) if words else words
    options = _parse(experiment_parser(name, module), words)
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(module.Params)
        if getattr(options, field.name) is not None
    }
    return options, parse_params(module.Params, given)


def experiment_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """One flag a field of Params, then the flags that all experiments share."""
    parser = _Parser(
        prog=f"python -m rlkernel {name}",
        description="\n".join(textwrap.wrap(f"{module.QUESTION} ({module.SUMMARY}.)", 96)),
        epilog=EXIT_CODES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(module.Params)
    own = parser.add_argument_group("parameters")
    for field in dataclasses.fields(module.Params):
        own.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            metavar=_metavar(hints[field.name]),
            help=_help(field, hints[field.name]).replace("%", "%%"),
        )
    run = parser.add_argument_group("running")
    alone = "print the summary as JSON, alone, on stdout"
    run.add_argument("--json", action="store_true", help=alone)
    run.add_argument("--force", action="store_true", help="measure again what was measured before")
    run.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="S", help="for all of it [s] (600)"
    )
    wait = "how long a rank waits for another [s] (25)"
    run.add_argument("--peer-timeout", type=_seconds, default=25.0, metavar="S", help=wait)
    run.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="where run folders go ($RLKERNEL_RESULTS, else results/)",
    )
    return parser


def _help(field: dataclasses.Field, hint: object) -> str:
    """help [unit] (default), then the choices where they are few enough to read."""
    meta = field.metadata
    unit = f" [{meta['unit']}]" if meta.get("unit") else ""
    default = field.default
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    text = f"{meta.get('help', describe(hint))}{unit} ({shown})"
    choices = meta.get("choices") or ()
    return f"{text}; one of {', '.join(map(str, choices))}" if choices else text


def _metavar(hint: object) -> str:
    words = {int: "N", float: "X", str: "WORD", bool: "true|false"}
    kinds = [kind for kind in typing.get_args(hint) if kind not in (Ellipsis, type(None))]
    if typing.get_origin(hint) in (tuple, list):
        word = words.get(kinds[0], "VALUE")
        return f"{word}[,{word}...]"
    return words.get(kinds[0] if kinds else hint, "VALUE")


def _print_json(module: ModuleType, params: object, record: Record, code: int) -> None:
    summary = {"passed": False}
    if record.status == "ok":
        summary = module.summary(params, record.rows)
    elif record.run.get("reason"):
        summary["reason"] = record.run["reason"]
    summary |= {"record": _shown(record.path), "status": record.status, "exit_code": code}
    print(json.dumps(_finite(summary), indent=1, allow_nan=False))


def _print_text(module: ModuleType, params: object, record: Record, code: int) -> None:
    """Table, checks, then the folder as the last line."""
    if record.rows and record.status == "ok":
        print("\n".join(_columns(*module.table(params, record.rows))), end="\n\n")
    if record.status == "skipped":
        print(f"NOT MEASURED here: {record.run['reason']}\n")
    checks = (record.run.get("verdict") or {}).get("checks", [])
    header = ["check", "", "value", "limit"]
    body = [
        [check["name"], "holds" if check["passed"] else "FAILED", check["value"], check["limit"]]
        for check in checks
    ]
    if body:
        print("\n".join(_columns(header, body)), end="\n\n")
    print(_shown(record.path))


def _columns(header: list, body: list[list]) -> list[str]:
    """Aligned text; columns of numbers to the right."""
    rows = [[_cell(value) for value in row] for row in [header, *body]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [all(_is_number(row[i]) for row in body) and bool(body) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def _finite(value: object) -> object:
    """JSON has no word for NaN and infinity: they become text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# -- commands: each a thin call into the part that does it -------------------------------------


def _page(module: str, entry: str = "main") -> Callable[[list[str]], int]:
    """A command of rlkernel.pages, which is imported when it is called."""
    return lambda rest: getattr(importlib.import_module(f"rlkernel.pages.{module}"), entry)(rest)


def _publish(rest: list[str]) -> int:
    parser = _Parser(
        prog="python -m rlkernel publish",
        description=COMMANDS["publish"],
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder with status ok")
    parser.add_argument("--name", help="the name to publish it under (the folder's own)")
    options = _parse(parser, rest)
    from rlkernel.records.publish import Refused, publish

    try:
        print(_shown(publish(options.run, options.name)))
    except Refused as error:
        raise UsageError(str(error)) from error
    return 0


_COMMANDS = {
    "report": _page("report"),
    "notebook": _page("report", "notebook"),
    "sweep": _page("sweep"),
    "publish": _publish,
    "refresh": _page("refresh"),
    "submission": _page("submission"),
    "readme": _page("readme"),
}


# -- small things ------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Unknown flags are refused with the nearest known one."""
    options, rest = parser.parse_known_args(words)
    if not rest:
        return options
    first = rest[0].partition("=")[0]
    if not first.startswith("-"):
        raise UsageError(f"unexpected argument {first}; lists are written with commas: 2,4")
    known = [flag for action in parser._actions for flag in action.option_strings]
    raise UsageError(unknown("flag", first, known))


def _load(name: str) -> ModuleType:
    try:
        return experiments.load(name)
    except (ValueError, ImportError) as error:
        if "." in name:
            raise UsageError(str(error)) from error
        known = [*experiments.NAMES, *COMMANDS]
        raise UsageError(unknown("experiment or command", name, known)) from error


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text}")
    return value


def _shown(path: Path) -> str:
    """Relative to where we are, if it is below."""
    path = path.resolve()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


if __name__ == "__main__":
    sys.exit(main())
