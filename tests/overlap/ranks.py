"""What every rank of the A2A-FFN's tests runs, over gloo: the checks of values.py and chunked.py.

    torchrun --nproc-per-node 8 ranks.py FOLDER

A check is a function of `world` that asserts on every rank. Groups are made by everybody in the
same order; a rank outside a group waits at the end of the check.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch

from rlkernel.collectives.groups import World
from rlkernel.grid import Grid

# Imported for what they register.
from tests.overlap import chunked, values  # noqa: F401
from tests.overlap.registered import CHECKS, SIZES


def main(out: Path) -> None:
    torch.set_num_threads(1)
    world = World.join("gloo", 20)
    report = dict.fromkeys(CHECKS, "not run: an earlier check failed on some rank")
    file = out / f"rank{world.rank}.json"
    for ranks in SIZES:  # groups are made by everybody, in the same order
        world.comm(Grid(dp=ranks))
    for name, function in CHECKS.items():
        try:
            function(world)
            report[name] = None
        except Exception:
            report[name] = traceback.format_exc()
            raise
        finally:
            file.write_text(json.dumps(report))
        world.meet(name, 60)
    world.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
