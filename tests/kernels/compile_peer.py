"""Compile the kernels of rounds for sm_90 without a GPU; print one JSON object a kernel.

    python tests/kernels/compile_peer.py

Every form between two ranks and among eight, in the cuts that launches choose. The PTX is counted:
how data and flags travel decides whether a sum is right, and no CPU can tell.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlkernel.kernels import peer_gather, peer_reduce, peer_words
from rlkernel.kernels.peer_memory import Arena, Peers
from rlkernel.kernels.peer_shot import (
    STEPS_OF_MORE,
    STEPS_OF_TWO,
    STREAM_OF_MORE,
    STREAM_OF_TWO,
)
from tests.kernels.compile_only import TARGETS, compiled
from tests.kernels.disassembly import describe

TYPES = {"bases": "*i64", "epochs": "*i32", "limit_ns": "i64"}
KERNELS = {"words": peer_words._all_reduce_words, "once": peer_reduce._once}
KERNELS["twice"] = peer_reduce._twice
COUNTED = ("ld.volatile.global.v4.b32", "ld.volatile.global.v2.b64", "ld.acquire.sys.global")
COUNTED += (
    "fence.acq_rel.sys",
    "st.relaxed.sys.global",
    "st.global.v4.b32",
    "st.global.v2.b64",
    "multimem",
)


FORMS = {
    2: (STEPS_OF_TWO, STREAM_OF_TWO, (("bf16", True), ("fp32", False))),
    8: (STEPS_OF_MORE, STREAM_OF_MORE, (("bf16", True), ("bf16", False))),
}


def kernels() -> Iterator[tuple[str, object, dict, str, object]]:
    """(title, kernel, constants, type of x and out, cut)."""
    for size, (steps, streams, kinds) in FORMS.items():
        peers = Peers(Arena(size), size - 1, None, None, 0)
        for kind, rounded in kinds:
            wire = {"WIRE": tl.bfloat16 if kind == "bf16" else tl.float32, "NODE_BF16": rounded}
            title = f"P={size} {kind} {'rounded' if rounded else 'fp32'}"
            for cut in (cut for _, cut in steps):
                constants = {**wire, **peers.constants(cut.form == "words")}
                constants["BLOCK"] = cut.block // (2 if kind == "bf16" else 4)
                kernel = KERNELS[cut.form]
                if cut.form == "once":
                    constants |= {"FIRST": 0, "SPAN": size, "ROWS": False}
                yield f"{cut.form} {title}", kernel, constants, kind, cut
            cut = streams[-1][1]
            constants = {**wire, **peers.constants(), "FIRST": 0, "SPAN": size, "ROWS": True}
            constants["BLOCK"] = cut.block // (2 if kind == "bf16" else 4)
            yield f"rows {title}", peer_reduce._once, constants, kind, cut
        constants = {**peers.constants(), "WIRE": tl.int32, "BLOCK": cut.block // 4}
        yield f"gather P={size} i32", peer_gather._all_gather, constants, "i32", cut


def main() -> None:
    for title, kernel, constants, kind, cut in kernels():
        types = {**TYPES, "x": f"*{kind}", "out": f"*{kind}"}
        result = compiled(kernel, types, constants, TARGETS["sm_90"], num_warps=cut.warps)
        counts = {words: result.asm["ptx"].count(words) for words in COUNTED}
        facts = {"kernel": title, "config": vars(cut), **describe(result), "ptx": counts}
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
