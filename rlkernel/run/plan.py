"""What a measurement asks for, what of it is known already, and what is left to run."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rlkernel.experiments import registry
from rlkernel.experiments.case import Case, UsageError, parse_params
from rlkernel.records import machine, store
from rlkernel.records.keys import digest, reuse_key
from rlkernel.records.source import closure, source_hash
from rlkernel.records.store import Record
from rlkernel.run import nodes

# An experiment is handed its seam, so its own imports need not reach the code that moves the bytes.
SEAM = "rlkernel.collectives.groups"


@dataclass(frozen=True)
class Batch:
    """Cases that one launch runs. environment: what its ranks start with, beside the usual."""

    world: int
    environment: dict[str, str]
    pending: list[tuple[Case, str]]


@dataclass(frozen=True)
class Plan:
    """Made without side effects: nothing is on disk and nothing has been started.

    name: what registry.load takes. reuse: one key a case. done: case key -> earlier row. skip:
    why this machine cannot measure it. last_world: ranks of the launch that ended last. source,
    seam: hashes of the experiment's code and of what moves bytes between its ranks.
    """

    name: str
    module: ModuleType
    params: object
    cases: list[Case]
    reuse: list[str]
    done: dict[str, dict]
    complete: Record | None
    source: str
    seam: str
    environment: dict
    device: str
    skip: str | None
    last_world: int = 0

    @property
    def backend(self) -> str:
        asked = getattr(self.params, "transport", "auto")
        if self.device != "cuda":
            return "gloo"
        return "nccl" if asked == "auto" else asked

    @property
    def pending(self) -> list[tuple[Case, str]]:
        """(case, reuse key) of what nobody has measured yet, in the order asked for."""
        return [
            (case, key)
            for case, key in zip(self.cases, self.reuse, strict=True)
            if case.key not in self.done
        ]

    @property
    def world(self) -> int:
        """Ranks to launch: the largest grid among the pending cases (0 where none is)."""
        return max((case.grid.size for case, _ in self.pending), default=0)

    @property
    def nodes(self) -> int:
        """Nodes that the ranks belong on."""
        return nodes_of(self.module, self.params)

    @property
    def batches(self) -> list[Batch]:
        """One launch for everything pending; where placement counts and on GPUs, one for each world
        size, and one for each environment that a case asks for (`environment(case)` of its module).

        On GPUs, since symmetric memory counts its meetings process by process: ranks that have met
        in a smaller group wait for the others under numbers that those never come to."""
        wanted = getattr(self.module, "environment", lambda case: {})
        found: dict[tuple, Batch] = {}
        for case, key in self.pending:
            env = wanted(case)
            apart = case.grid.size if self.nodes > 1 or self.device == "cuda" else 0
            batch = found.setdefault((apart, *sorted(env.items())), Batch(0, env, []))
            batch.pending.append((case, key))
        return [
            Batch(max(case.grid.size for case, _ in b.pending), b.environment, b.pending)
            for b in found.values()
        ]

    @property
    def parameters(self) -> dict:
        return as_json(self.params)


def make(experiment: str, params: object, root: Path | None, force: bool) -> Plan:
    """Raises UsageError for anything that cannot be run."""
    try:
        module = registry.load(experiment)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    if not dataclasses.is_dataclass(params):
        params = parse_params(module.Params, dict(params))
    cases = list({case.key: case for case in module.cases(params)}.values())
    if not cases:
        raise UsageError(f"{module.NAME}: these parameters ask for no case")
    environment = machine.environment()
    source, seam = source_hash(module.__name__), source_hash(SEAM)
    apart = max(nodes_of(module, params), nodes.asked()[0])
    device, skip = place(params, cases, environment, apart)
    skip = skip or getattr(module, "lacks", lambda: None)()
    code = source if SEAM in closure(module.__name__) else digest([source, seam])
    reuse = [reuse_key(case.key, code, environment, device) for case in cases]
    done: dict[str, dict] = {}
    complete = None
    if not force:
        # What ran over several machines is no answer for this one, by itself.
        earlier = [r for r in store.find(module.NAME, root) if not nodes.apart(r.run)]
        complete = _complete(earlier, as_json(params), reuse)
        done = _known(earlier, cases, reuse)
    return Plan(
        experiment, module, params, cases, reuse, done, complete, source, seam, environment, device,
        skip,
    )  # fmt: skip


def nodes_of(module: ModuleType, params: object) -> int:
    """What a `nodes` parameter says, else the module's NODES, else 1."""
    return getattr(params, "nodes", getattr(module, "NODES", 1))


def place(
    params: object, cases: list[Case], environment: dict, nodes: int = 1
) -> tuple[str, str | None]:
    """("cpu" or "cuda", why that is impossible here or None).

    A `target` or `device` parameter decides; "auto", and none at all, takes GPUs where there are
    enough: one a rank, or any one under `transport` gloo, whose ranks may share it. Ranks of
    different nodes may share one too: NCCL takes emulated nodes for hosts of their own.
    """
    target = getattr(params, "target", getattr(params, "device", "auto"))
    shared = getattr(params, "transport", "auto") == "gloo"
    needed = 1 if shared else max(1, -(-max(case.grid.size for case in cases) // nodes))
    usable = _visible(len(environment["gpus"])) if "+cpu" not in (environment["torch"] or "") else 0
    if target == "cuda" and usable < needed:
        return "cuda", f"needs {needed} GPU(s), this machine has {usable} that torch can use"
    if target == "auto":
        return ("cuda" if usable >= needed else "cpu"), None
    return target, None


def _visible(present: int) -> int:
    """How many of the GPUs CUDA_VISIBLE_DEVICES leaves to this process."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if asked is None else min(present, len([d for d in asked.split(",") if d]))


def command(module: ModuleType, params: object) -> list[str]:
    """The command line that asks for the same: only what differs from the defaults."""
    words = ["python", "-m", "rlkernel", getattr(module, "NAME", module.__name__)]
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            many = isinstance(value, tuple)
            text = ",".join(map(str, value)) if many else str(value)
            words += [f"--{field.name.replace('_', '-')}", text]
    return words


def as_json(params: object) -> dict:
    """Parameters as they read back from run.json: tuples are lists there."""
    return json.loads(json.dumps(dataclasses.asdict(params)))


def key8(plan: Plan) -> str:
    """Names what was asked: parameters and cases."""
    return digest([plan.parameters, [case.key for case in plan.cases]])[:8]


def _complete(earlier: list[Record], parameters: dict, reuse: list[str]) -> Record | None:
    """The newest finished run that asked for exactly this, under the same reuse keys."""
    for record in earlier:
        same = record.status == "ok" and record.parameters == parameters
        if same and [row["reuse"] for row in record.rows] == reuse:
            return record
    return None


def _known(earlier: list[Record], cases: list[Case], reuse: list[str]) -> dict[str, dict]:
    """Rows of any earlier run, however that ended, that may stand for these cases; newest first."""
    wanted = dict(zip(reuse, cases, strict=True))
    known: dict[str, dict] = {}
    for record in earlier:
        for row in record.rows:
            case = wanted.get(row["reuse"])
            if case is not None and case.key not in known:
                known[case.key] = {"reused_from": record.path.name} | row
    return known
