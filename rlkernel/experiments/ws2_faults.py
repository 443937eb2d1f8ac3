"""Which parameters a fault of ws2 heeds; whatever else was given is refused before a launch.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import fields

from rlkernel.experiments.case import UsageError

HEEDED = {  # fault -> what changes it, beside seed and device
    "swap-shards": ("what", "contract", "m", "size"),
    "wire-dtype": ("m", "size"),
    "nccl-settings": (),
    "lost-cp-rank": ("contract", "m", "size"),
}
FAULTS = ("none", *HEEDED)
ALWAYS = ("seed", "device")
VERSION_1 = "tree2.bf16"
SHOWN_BY = {  # track -> contracts under which it has a product of down, whose shard is swapped
    "forward": (VERSION_1, "tree2.fp32"),
    "backward": (VERSION_1,),  # dH is a chain, looked at under version 1
}


def check(params) -> None:
    """Raise UsageError for what was given and would change nothing of params.fault."""
    fault, heeded = params.fault, (*HEEDED[params.fault], *ALWAYS)
    given = {f.name: getattr(params, f.name) for f in fields(params)
             if getattr(params, f.name) != f.default and f.name != "fault"}  # fmt: skip
    for name, value in given.items():
        if name not in heeded:
            raise UsageError(f"{name}={_told(value)} changes nothing under fault={fault}: leave it "
                             f"out; given may be {', '.join(heeded)}")  # fmt: skip
    blind = [part for part in given.get("what", ()) if part not in SHOWN_BY]
    if blind:
        raise UsageError(f"what={_told(blind)} does not show fault={fault}, a wrong shard of down: "
                         f"expected {' or '.join(SHOWN_BY)}; leave it out for both")  # fmt: skip
    if fault == "swap-shards" and not shown(params):
        raise UsageError(f"contract={_told(params.contract)} with what={_told(params.what)} does "
                         f"not show fault={fault}: dH is a chain under any contract, looked at "
                         f"under {VERSION_1}; add that contract, or what=forward")  # fmt: skip
    for name in ("contract", "m") if fault == "lost-cp-rank" else ():
        if len(given.get(name, ())) > 1:
            raise UsageError(f"{name}={_told(given[name])}: fault={fault} ends in its first sum: "
                             "expected one value; give one, or none")  # fmt: skip


def shown(params) -> list[tuple[str, str]]:
    """(track, contract) of all that was asked for in which swapped shards show."""
    return [(track, contract) for track, under in SHOWN_BY.items() for contract in params.contract
            if track in params.what and contract in under]  # fmt: skip


def _told(given: object) -> str:
    return ",".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
