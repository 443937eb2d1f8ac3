"""measure(): from parameters to a record on disk, by one torchrun launch.

Torch-free: the caller (a notebook, the command line) never initialises a process group. It owns
run.json; rank 0 appends the rows. Cases that were measured before, by the same code on the same
machine, are not run again.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rlkernel.experiments.case import Case, UsageError
from rlkernel.records import machine, store
from rlkernel.records.keys import digest
from rlkernel.records.scrub import REPOSITORY, scrub
from rlkernel.records.store import Record, RunFolder
from rlkernel.run import blame, lifeline, nodes, plan, remains, switches, traces, watch
from rlkernel.run.plan import Plan

MISUSED, CRASHED, TIMED_OUT = 2, 3, 4


class RunError(RuntimeError):
    """A launch that did not end well. exit_code: 2 a rank refused what it was given, 3 crashed, 4
    timed out, 128+n a signal.

    The message names the guilty rank and, of a crash, carries that rank's own traceback; `record`
    is the folder with all that was measured before.
    """

    def __init__(self, exit_code: int, record: Record, message: str) -> None:
        super().__init__(message)
        self.exit_code, self.record = exit_code, record


def measure(
    experiment: str,
    params: object,
    *,
    root: Path | str | None = None,
    force: bool = False,
    timeout_s: float = 600.0,
    peer_timeout_s: float = 25.0,
    argv: list[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Record:
    """Measure what `params` (a Params, or a dict of its fields, typed or text) ask for.

    root: the results folder. force: measure again what is known. timeout_s: for the whole launch.
    peer_timeout_s: how long a rank waits for another one. argv: what the record shows as the
    command. progress: called with a line as each case ends.

    Raises UsageError before anything is launched or written, RunError when ranks crash, the time is
    up or a signal comes, RecordError when the record cannot be written. A failed check is no error:
    see record.passed. SIGTERM and SIGHUP, where the caller left them at their default, act on the
    caller once the ranks have ended.
    """
    root = Path(root) if root else None
    # Nodes that know different cases already would launch different ones.
    asked = plan.make(experiment, params, root, force or nodes.asked()[0] > 1)
    say = progress or (lambda line: None)
    if asked.complete is not None:
        say(f"measured before: all {len(asked.cases)} cases")
        return asked.complete
    if asked.world and not asked.skip:
        watch.require_main_thread()
        nodes.check(batch.world for batch in asked.batches)
        with watch.catching() as signals:
            try:
                record = _run(asked, root, (timeout_s, peer_timeout_s), argv, say, signals)
            except RunError as error:
                record, problem = error.record, error
            else:
                problem = None
        _pass_on(signals)
        if problem is not None:
            raise problem
        return record
    return _without_launch(asked, root, argv)


def prepare(
    experiment: str,
    params: object,
    *,
    root: Path | str | None = None,
    timeout_s: float = 600.0,
    peer_timeout_s: float = 25.0,
) -> Path:
    """A run folder and its spec, for a torchrun typed by hand on several nodes -> the spec's path.

    Nobody waits for those ranks, so the folder keeps no verdict; once they have ended, measure()
    with the same parameters takes their rows and concludes.
    """
    asked = plan.make(experiment, params, Path(root) if root else None, force=True)
    if len(asked.batches) > 1:
        raise UsageError(f"{asked.name} needs {len(asked.batches)} launches: start its own command "
                         "on every node, with NNODES, NODE_RANK and MASTER_ADDR")  # fmt: skip
    folder = _create(asked, root, None)
    return write_spec(asked, folder, timeout_s, peer_timeout_s, asked.pending)


def _run(asked: Plan, root, timeouts, argv, say, signals) -> Record:
    """Folder, then spec and launch for each batch, conclusion; signals are only noted meanwhile."""
    timeout_s, peer_timeout_s = timeouts
    folder = _create(asked, root, argv)
    ticker = _Progress(asked, folder.path, say)
    began = time.monotonic()
    try:
        for number, batch in enumerate(asked.batches):
            write_spec(asked, folder, timeout_s, peer_timeout_s, batch.pending)
            left = timeout_s - (time.monotonic() - began)
            with nodes.made(asked.nodes, batch.world, asked.device, number) as where:
                outcome = _launch(asked, folder, batch, where, left, ticker, signals)
            if outcome.code or outcome.timed_out or outcome.signal is not None:
                break
    except BaseException as error:
        reason = scrub(f"the launcher failed: {type(error).__name__}: {error}")
        folder.update(status="crashed", reason=reason, exit_code=CRASHED, finished=store.now())
        raise
    seconds = time.monotonic() - began
    if where.agents[0].rank and not outcome.code:
        return _followed(folder, where, seconds)
    return _conclude(asked, folder, outcome, timeout_s, seconds, batch.world)


def _launch(asked: Plan, folder: RunFolder, batch, where, left, ticker, signals):
    """One torchrun world, on the nodes that were made for it."""
    ranks = "1 rank" if batch.world == 1 else f"{batch.world} ranks"
    told = "" if where.count == 1 else f" on {where.count} nodes ({where.how})"
    cases = f"{len(batch.pending)} of {len(asked.cases)} cases"
    ticker.say(f"launching {ranks}{told} ({asked.backend}, {asked.device}) for {cases}")
    more = dict(batch.environment)
    if "NCCL_DEBUG" in more:
        more["NCCL_DEBUG_FILE"] = str(folder.path / "log" / "nccl-%p.txt")
    if where.count > 1:
        folder.update(topology=store.read(folder.path).run["topology"] | where.describe())
    extra = () if where.count == 1 and not more else (where, more)
    outcome = watch.run_agent(
        folder.path, batch.world, asked.device, signals, left, ticker.look, *extra
    )
    ticker.look()
    return outcome


def _followed(folder: RunFolder, where, seconds: float) -> Record:
    """The end on a node that is not the first: its part went well, the record is elsewhere."""
    reason = f"node {where.agents[0].rank} of {where.count} has run; the record is on node 0"
    end = {"status": "skipped", "reason": reason, "exit_code": 0, "finished": store.now()}
    well = {"passed": True, "checks": []}  # the verdict on what was measured is node 0's
    folder.update(**end, verdict=well, seconds=round(seconds, 3))
    return store.read(folder.path)


def _without_launch(asked: Plan, root, argv) -> Record:
    """Everything is known from several folders, or this machine cannot measure it."""
    folder = _create(asked, root, argv)
    if asked.skip:
        end = {"status": "skipped", "reason": asked.skip, "exit_code": 1}
        folder.update(**end, finished=store.now(), seconds=0.0)
        return store.read(folder.path)
    return _finish(asked, folder, 0.0)


def _create(asked: Plan, root, argv: list[str] | None) -> RunFolder:
    module, protocol = asked.module, asked.module.protocol(asked.params)
    variables = switches.told(max(asked.nodes, nodes.asked()[0]), asked.device)
    run = {
        "argv": [scrub(word) for word in argv or plan.command(module, asked.params)],
        "parameters": asked.parameters,
        "cases": [case.to_dict() for case in asked.cases],
        "case_keys": [case.key for case in asked.cases],
        "source": asked.source,
        "seam": asked.seam,
        "git": machine.git(REPOSITORY),
        "environment": asked.environment | {"variables": variables},
        "topology": {
            "nodes": 1,
            "world": asked.world,
            "threads_per_rank": watch.THREADS,
            "lifeline": lifeline.describe(),
        },
        "backend": asked.backend,
        "device": asked.device,
        "protocol": protocol,
        "protocol_hash": digest(protocol),
        "verdict": None,
        "covered": list(module.COVERED),
        "not_covered": list(module.NOT_COVERED),
        "failures": [],
        "reused": len(asked.done),
        "exit_code": None,
        "finished": None,
        "seconds": None,
    }
    folder = RunFolder.create(module.NAME, asked.source[:8], plan.key8(asked), run, root)
    _copy_known(asked, folder)
    return folder


def _copy_known(asked: Plan, folder: RunFolder) -> None:
    """Rows that are known already, with their raw samples."""
    samples: dict[str, list[dict]] = {}
    for case in asked.cases:
        row = asked.done.get(case.key)
        if row is None:
            continue
        origin = row["reused_from"]
        if origin not in samples:
            samples[origin] = store.read_lines(folder.path.parent / origin / store.SAMPLES)
        folder.append_samples([s for s in samples[origin] if s["key"] == case.key])
        row = row | traces.copied(row, folder.path.parent / origin, folder.path)
        folder.append_row(row)


def write_spec(
    asked: Plan, folder: RunFolder, timeout_s: float, peer_timeout_s: float, pending: list
) -> Path:
    """What the ranks need to know; torchrun may be started on it by hand as well."""
    spec = {
        "experiment": asked.module.__name__,
        "backend": asked.backend,
        "device": asked.device,
        "timeout_s": timeout_s,
        "peer_timeout_s": peer_timeout_s,
        "cases": [
            {"key": case.key, "reuse": reuse, "case": case.to_dict()} for case, reuse in pending
        ],
    }
    path = folder.path / "spec.json"
    try:
        store.write_json(path, spec)
    except OSError as error:
        raise store.cannot("write", path, error) from error
    return path


class _Progress:
    """Reads the rows as they appear and says one line each."""

    def __init__(self, asked: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self.path, self.say, self.total = folder / store.ROWS, say, len(asked.cases)
        self.seen, self.size = len(asked.done), -1

    def look(self) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size == self.size:
            return
        self.size = size
        rows = store.read_lines(self.path)
        for row in rows[self.seen :]:
            self.seen += 1
            title, word = Case.from_dict(row["case"]).title, "ok" if row["passed"] else "FAILED"
            self.say(f"[{self.seen}/{self.total}] {title} {row['seconds']:.2f} s {word}")


def _conclude(asked: Plan, folder: RunFolder, outcome, timeout_s, seconds, world: int) -> Record:
    """Write down how it ended; raise RunError unless every case has its row.

    world: of the last launch.
    """
    asked = dataclasses.replace(asked, last_world=world)
    if outcome.signal is not None:
        status = "interrupted" if outcome.signal == signal.SIGINT else "killed"
        reason = f"{blame.signal_name(outcome.signal)} came to the launcher"
        return _fail(asked, folder, status, 128 + outcome.signal, reason, seconds)
    if outcome.timed_out:
        reason = f"not finished after {timeout_s:g} s"
        return _fail(asked, folder, "timed-out", TIMED_OUT, reason, seconds)
    report = remains.report(folder.path)
    if "signal" in report or outcome.code < 0:
        number = report.get("signal", -outcome.code)
        reason = f"{blame.signal_name(number)} came to the torchrun agent"
        return _fail(asked, folder, "killed", 128 + number, reason, seconds)
    if report.get("failures"):
        return _fail_by_rank(asked, folder, report["failures"], seconds)
    missing = len(asked.cases) - len(store.read(folder.path).rows)
    if outcome.code or missing:
        tail = remains.tail(folder.path / "log" / "agent.txt")
        reason = f"torchrun ended with exit code {outcome.code} and {missing} cases are missing"
        return _fail(asked, folder, "crashed", CRASHED, reason, seconds, details=tail)
    return _finish(asked, folder, seconds)


def _finish(asked: Plan, folder: RunFolder, seconds: float) -> Record:
    end = {"finished": store.now(), "seconds": round(seconds, 3)}
    try:
        rows = store.read(folder.path).rows
        verdict = asked.module.verdict(asked.params, rows)
        told = getattr(asked.module, "coverage", None)  # where the lists follow from the rows
        if told is not None:
            end |= dict(zip(("covered", "not_covered"), told(asked.params, rows)))
    except Exception as error:
        reason = scrub(f"no verdict: {type(error).__name__}: {error}")
        folder.update(status="crashed", reason=reason, exit_code=CRASHED, **end)
        raise
    code = 0 if verdict["passed"] else 1
    folder.update(status="ok", exit_code=code, verdict=verdict, **end)
    return store.read(folder.path)


def _fail_by_rank(asked: Plan, folder: RunFolder, failures: list[dict], seconds: float):
    fates = [
        blame.Fate(**failure, stack=remains.stack(folder.path, failure["rank"]))
        for failure in failures
    ]
    judgement = blame.judge(asked.last_world, fates, nodes.away(asked.last_world))
    first = judgement.of(judgement.guilty[0])
    error = next((fate.error for fate in fates if fate.rank == first["rank"]), None)
    if error and error.get("usage"):
        reason = f"bad usage, says rank {first['rank']} of {asked.last_world}: {error['message']}"
        return _fail(asked, folder, "crashed", MISUSED, reason, seconds, judgement.failures)
    reason = f"rank {first['rank']} of {asked.last_world} {first['reason']}"
    details = first["traceback"] or "it left no traceback"
    return _fail(asked, folder, "crashed", CRASHED, reason, seconds, judgement.failures, details)


def _fail(asked, folder, status, code, reason, seconds, failures=None, details=""):
    """Write the failure and raise it."""
    reason = scrub(reason)
    if failures is None:
        stacks = {rank: remains.stack(folder.path, rank) for rank in range(asked.last_world)}
        failures = blame.all_ended(asked.last_world, f"ended: {reason}", stacks)
        details = details or "\n".join(f"rank {r} stood at\n{s}" for r, s in stacks.items() if s)
    for failure in failures:
        failure["reason"] = scrub(failure["reason"])
        failure["traceback"] = scrub(failure["traceback"]) if failure["traceback"] else None
    end = {"finished": store.now(), "seconds": round(seconds, 3)}
    folder.update(status=status, reason=reason, exit_code=code, failures=failures, **end)
    record = store.read(folder.path)
    done = f"{len(record.rows)} of {len(asked.cases)} cases are measured and stay"
    if code == MISUSED:
        raise RunError(code, record, f"{asked.module.NAME}: {reason}\n{done}")
    others = [f"rank {f['rank']}: {f['reason']}" for f in failures]
    # Who stops a run knows why: where each rank stood is in the record, not on the screen.
    shown = "" if status == "interrupted" else scrub(details).rstrip()
    lines = [f"{asked.module.NAME} {status}: {reason}", shown, *others, done]
    raise RunError(code, record, "\n".join(line for line in lines if line))


def _pass_on(signals: watch.Signals) -> None:
    """A caller that left a deadly signal at its default dies of it now, its ranks being gone."""
    for number in signals.caught:
        if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_DFL:
            signal.raise_signal(number)
