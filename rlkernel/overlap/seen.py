"""What a trace shows of each variant on every rank: the measured side of the hidden fraction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlkernel.collectives.comm import Comm
from rlkernel.records import perfetto, trace

CHECK = "traces: every kernel of every call is there"


def seen(
    file: str | Path, variants: Sequence[str], comm: Comm, staged: bool = False
) -> tuple[dict, list]:
    """A profiler's file with a range a variant -> (variant -> [what records/trace.py says of each
    rank], [check, holds, value, limit]). A trace that lacks kernels is a failed check. staged:
    messages of GPUs go through the host, where no trace of a device shows them.

    The file is written anew: what the analysis reads, and nothing that names the machine.
    """
    mine, said = {}, ""
    expect = ("gemm", "comm") if comm.grid.size > 1 and not staged else ("gemm",)
    try:
        found = trace.read(file)
        mine = {name: trace.overlap(found, name, expect) for name in variants}
        perfetto.merge(slim := f"{file}.slim", {found.rank: file})
        os.replace(slim, file)
    except trace.TraceError as error:
        said = str(error)
    ranks = comm.collect((mine, said))
    failed = [said for _, said in ranks if said]
    value = failed[0] if failed else f"{len(variants)} variants on {len(ranks)} ranks"
    check = [CHECK, not failed, value, "as many as were launched"]
    if failed:
        return {}, check
    return {name: [one[name] for one, _ in ranks] for name in variants}, check
