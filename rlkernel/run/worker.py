"""One rank: runs its part of every case of a spec, in step with the others.

    torchrun [...] -m rlkernel.run.worker SPEC.json

The spec lies in the run folder on the node of rank 0, the only one that writes results; a copy of
it is enough on other nodes. Each rank's output goes to log/rankN.txt beside the spec.

Between two cases all ranks meet through the store. A rank outside a case's grid waits there, not
inside a collective, so a small case never keeps a large group half open.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from rlkernel.run import lifeline, switches, traces, watch
from rlkernel.run.agent import AGENT_PID


def main(argv: list[str]) -> int:
    agent = os.environ.get(AGENT_PID)
    lifeline.die_with_parent(signal.SIGKILL, int(agent) if agent else None)
    spec_path, rank = Path(argv[0]), int(os.environ["RANK"])
    os.environ.update(watch.MULTICAST_OFF)  # a torchrun typed by hand has the shell's variables
    try:
        _redirect(spec_path.parent / "log", rank)
        _show_where_it_stood()
        work(json.loads(spec_path.read_text()), spec_path.parent)
        return 0
    except BaseException as error:
        traceback.print_exc()
        leave_word(error)
        sys.stderr.flush()
        # No farewell to the other ranks: after a failure it may wait for one that is dead.
        os._exit(1)


def work(spec: dict, folder: Path) -> None:
    """Join the world, run the cases, let rank 0 append a row as each one ends."""
    # What importing torch makes stays: looking through it for garbage, meanwhile, in the middle of
    # a measurement and at the end, costs a rank a third of its start.
    gc.disable()
    from rlkernel import experiments
    from rlkernel.collectives.groups import World
    from rlkernel.experiments.case import Case
    from rlkernel.records.store import RunFolder, now
    from rlkernel.run.bounded import BoundedStore

    agents = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    os.environ.update(switches.between_nodes(agents, spec["device"]))
    experiment = experiments.load(spec["experiment"])
    gc.freeze()
    gc.enable()
    world = World.join(spec["backend"], spec["peer_timeout_s"], spec["device"])
    world.store = BoundedStore(world.store)
    home = RunFolder(folder)
    if agents > 1:
        nodes_alike(world, experiment.__name__, [item["case"] for item in spec["cases"]])
    for number, item in enumerate(spec["cases"]):
        case = Case.from_dict(item["case"])
        print(f"case {number + 1} of {len(spec['cases'])}: {case.title}", flush=True)
        comm = world.comm(case.grid)
        if comm is not None:
            began = time.perf_counter()
            result = experiment.run(case, comm)
            seconds = time.perf_counter() - began
            samples = result.pop("samples", [])
            alone = len(spec["cases"]) == 1
            file = traces.name(case, world.rank, alone)
            traces.keep(result.pop("trace", None), folder, file)
            if int(os.environ.get("GROUP_RANK", 0)):
                traces.hand_over(world.store, folder, file)
            world.store.set(f"samples/{number}/{world.rank}", json.dumps(samples))
        world.meet(f"case {number} ran", spec["timeout_s"])
        if world.rank == 0:
            traces.take_over(world.store, case, folder, alone)
            home.append_samples(_samples(world.store, number, case))
            home.append_row(
                {
                    "key": item["key"],
                    "reuse": item["reuse"],
                    "case": item["case"],
                    "result": result,
                    "passed": bool(result["passed"]),
                    "seconds": round(seconds, 6),
                    "paths": comm.paths(),
                    **traces.of(case, folder, alone),
                    "backend": spec["backend"],
                    "device": spec["device"],
                    "world": world.size,
                    "finished": now(),
                }
            )
        # What is done is on disk before anything else begins, and no disk disturbs a measurement.
        world.meet(f"case {number} is written", spec["timeout_s"])
    world.leave()


def nodes_alike(world, module: str, cases: list[dict]) -> None:
    """Raise UsageError on every rank unless all nodes have the same code, libraries and cases."""
    from rlkernel.experiments.case import UsageError
    from rlkernel.records import machine
    from rlkernel.records.keys import digest
    from rlkernel.records.source import source_hash
    from rlkernel.run.plan import SEAM

    here = machine.environment()
    facts = {name: here[name] for name in ("torch", "triton", "nccl")}
    facts |= {"source": source_hash(module), "seam": source_hash(SEAM)}
    facts |= {"what was asked for": digest(cases)}
    world.store.set(f"node/{world.rank}", json.dumps(facts))
    world.meet("nodes described", world.timeout_s)
    for rank in range(world.size):
        theirs = json.loads(world.store.get(f"node/{rank}"))
        for name, value in facts.items():
            if theirs[name] != value:
                raise UsageError(
                    f"nodes differ in {name}: rank {world.rank} has {value}, rank {rank} "
                    f"{theirs[name]}. Every node needs the same software, code and flags"
                )


def _samples(store, number: int, case) -> list[dict]:
    """Every rank's raw samples of a case, marked with its key and rank. All ranks have posted."""
    marked = []
    for rank in range(case.grid.size):
        name = f"samples/{number}/{rank}"
        for sample in json.loads(store.get(name)):
            marked.append({"key": case.key, "rank": rank, **sample})
        store.delete_key(name)
    return marked


def leave_word(error: BaseException) -> None:
    """Write the error where torchrun looks for it, with what the launcher needs to find the guilty.

    torchrun prints py_callstack; the agent hands on all of extraInfo.
    """
    from rlkernel.collectives.errors import PeerLost
    from rlkernel.experiments.case import UsageError

    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = "".join(traceback.format_exception(error))
    lost = isinstance(error, PeerLost)
    info = {
        "py_callstack": text,
        "timestamp": str(int(time.time())),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": text,
        "time": time.time(),
        "usage": isinstance(error, UsageError),
        "peer_lost": lost,
        "suspects": list(error.ranks) if lost else [],
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": info}
    try:
        Path(path).write_text(json.dumps({"message": message}))
    except OSError as failed:  # a full disk took the error with it; the log may have it
        print(f"could not leave the error for torchrun: {failed}", file=sys.stderr)


def _redirect(folder: Path, rank: int) -> None:
    """File descriptors, not sys.stdout: C++ and crash handlers write there too."""
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _show_where_it_stood() -> None:
    """On a crash in C++, and on the signal that ends a rank: the Python stack goes to the log.

    The handler needs no interpreter lock, so it works for a rank that hangs in a collective; then
    the signal does what it would have done.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
