"""`python -m rlkernel refresh`: measure published records anew, each by its own command line.

A record says how it was made, so whoever doubts one, or finds it older than the code, makes it
again: the command is read from the record, run here, and what comes of it takes the record's name.
A run that does not end well leaves the old record where it is; so does a machine that cannot
measure it. What was replaced stays in git.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from rlkernel import records
from rlkernel.pages import evidence
from rlkernel.pages.costs import STALE
from rlkernel.records import Record
from rlkernel.records.publish import committed_root, publish


def command(record: Record) -> list[str]:
    """Words behind `python -m rlkernel`: the experiment and its flags, without those of how it was
    shown. Raises RecordError for a record that was not made by this command line.
    """
    argv = record.run.get("argv", [])
    if record.experiment not in argv:
        raise records.RecordError(f"{name_of(record)} does not say which command made it: {argv}")
    words = argv[argv.index(record.experiment) :]
    return [word for word in words if word not in ("--json", "--force")]


def name_of(record: Record) -> str:
    return f"{record.experiment}/{record.path.name}"


def chosen(patterns: Sequence[str], stale: bool) -> list[Record]:
    """Published records whose experiment/name fits a pattern, by name; all without one."""
    found = evidence.published(committed_root())
    wanted = [r for r in found
              if not patterns or any(fnmatch.fnmatch(name_of(r), p) for p in patterns)]  # fmt: skip
    return [r for r in wanted if evidence.is_stale(r)] if stale else wanted


def again(record: Record) -> str:
    """Measure and replace it. What happened, in words; it begins with "replaced" if it was."""
    words, before = command(record), {r.path for r in records.find(record.experiment)}
    env = {**os.environ, **record.run.get("environment", {}).get("variables", {})}
    code = subprocess.run([sys.executable, "-m", "rlkernel", *words], env=env).returncode
    new = [r for r in records.find(record.experiment) if r.path not in before]
    if not new or new[0].status != "ok":
        return f"kept: exit code {code}, {new[0].status if new else 'no record'}"
    if bool(new[0].passed) != bool(record.passed):
        return f"kept: the verdict is another one, look at {new[0].path}"
    aside = record.path.with_name(f".old-{record.path.name}")
    record.path.rename(aside)
    try:
        publish(new[0].path, record.path.name)
    except BaseException:
        aside.rename(record.path)
        raise
    shutil.rmtree(aside)
    return f"replaced, exit code {code}"


def main(argv: list[str] | None = None) -> int:
    """`refresh [--stale] [--list] [PATTERN ...]`; 1 if any was kept."""
    parser = argparse.ArgumentParser(
        prog="python -m rlkernel refresh",
        description="Measure published records anew, each by the command that it holds, and "
        "replace those that end well.",
    )
    parser.add_argument("pattern", nargs="*", metavar="PATTERN",
                        help="EXPERIMENT/NAME, * stands for anything; all without one")  # fmt: skip
    parser.add_argument("--stale", action="store_true", help="only those older than the code")
    parser.add_argument("--list", action="store_true", help="say the commands and run nothing")
    asked = parser.parse_args(argv)
    found = chosen(asked.pattern, asked.stale)
    if not found:
        asked_for = " ".join([*asked.pattern, *["--stale"] * asked.stale])
        print(f"refresh: no published record fits {asked_for}; --list names all", file=sys.stderr)
        return 2
    told = []
    for number, record in enumerate(found, 1):
        mark = STALE * evidence.is_stale(record)
        print(f"[{number}/{len(found)}] {name_of(record)}{mark}, {record.machine_label}")
        print(f"    python -m rlkernel {shlex.join(command(record))}", flush=True)
        if not asked.list:
            told.append(again(record))
            print(f"    {told[-1]}", flush=True)
    return int(any(not said.startswith("replaced") for said in told))
