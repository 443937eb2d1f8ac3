"""Checks of sums through shared memory that need GPUs, or processes of their own: by hand only."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

import torch
from checks import check, noise, refused
from sharing import arena_of, both, children

from rlkernel.compare import bit_report
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid

BF16, FP32 = torch.bfloat16, torch.float32
HERE, MB = Path(__file__).parent, 1 << 20


def pair(world):
    ((ours, theirs),) = both(world, Grid(tp=2))
    return ours, theirs


def differing(x, right):
    """Elements with other bits, counted on the GPU: nobody waits for the number."""
    kind = {2: torch.int16, 4: torch.int32}[x.itemsize]
    return (x.view(kind) != right.view(kind)).sum()


@check(2, devices=("cuda",))
def a_thousand_late_calls_of_4_to_64_mib(world):
    """Two messages of each size at random, alike on both ranks; each rank is late by itself."""
    ours, theirs = pair(world)
    order, late, wrong = random.Random(1), random.Random(world.rank), 0
    known = []
    for number, size in enumerate((4 * MB, 16 * MB, 64 * MB, 4 * MB, 16 * MB, 64 * MB)):
        x = noise(300 + 10 * number + world.rank, size // 2, dtype=BF16, device=ours.device)
        known.append((x, theirs.all_reduce(x, "sum")))
    for number in range(1000):
        x, right = order.choice(known)
        if late.random() < 0.3:
            time.sleep(late.random() * 0.01)
        wrong = wrong + differing(ours.all_reduce(x, "sum"), right)
        if number % 100 == 0:
            torch.cuda.empty_cache()  # memory comes and goes between
    assert int(wrong) == 0
    ours.links["tp"].transport.settle()


@check(2, devices=("cuda",))
def a_hundred_replays_of_a_graph(world):
    """Of every collective, in every form, with other data; nothing is opened under capture."""
    ours, theirs = pair(world)
    kinds = ((ReductionTree(8, "bf16"), BF16), (ReductionTree(8, "fp32"), FP32))
    for (tree, dtype), size in ((kind, size) for kind in kinds for size in (1 << 14, MB, 9 * MB)):
        a, b = ours.using(contract=tree), theirs.using(contract=tree)
        calls = {
            "sum": lambda comm, x: comm.all_reduce(x, "sum"),
            "part": lambda comm, x: comm.reduce_scatter(x, "part"),
            "whole": lambda comm, x: comm.all_gather(x, "whole"),
        }
        seeds = [noise(400 + 10 * n + world.rank, size // dtype.itemsize, dtype=dtype,
                       device=ours.device) for n in range(4)]  # fmt: skip
        right = [{name: call(b, x) for name, call in calls.items()} for x in seeds]
        x = seeds[0].clone()
        for call in calls.values():  # agreed and compiled outside
            call(a, x)
        torch.cuda.synchronize()
        graph, wrong = torch.cuda.CUDAGraph(), 0
        # NCCL's watchdog asks for events in a thread of its own, which must not end the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = {name: call(a, x) for name, call in calls.items()}
            told = ("while a CUDA graph is captured",)
            refused(ValueError, told, lambda: arena_of(world, ours.links["tp"]))
        for number in range(100):
            x.copy_(seeds[number % 4])
            graph.replay()
            for name, found in out.items():
                wrong = wrong + differing(found, right[number % 4][name])
        assert int(wrong) == 0, (tree.name, dtype, size)
        for name, call in calls.items():  # and plain calls go on behind it
            assert bit_report(call(a, seeds[1]), right[1][name])


@check(2, devices=("cuda",))
def segments_that_expand_hold_every_tensor(world):
    """A world of fresh processes under PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
    launch = world.store.get("name of the launch").decode()
    out = f"{tempfile.gettempdir()}/expandable-{launch}.json"
    only = "sizes_around_every_threshold_and_odd_places", a_hundred_replays_of_a_graph.__name__
    words = (str(HERE / "shared.py"), "--device", "cuda", "--only", ",".join(only), "--out", out)
    done = children(world, *words, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if world.rank == 0:
        said = json.loads(Path(out).read_text())
        assert said["expandable segments"] and len(said["checks"]) == 2, said


@check(devices=("cpu", "cuda"))
def a_rank_that_died_is_named(world):
    """In a world of fresh processes, one of which is killed in front of a sum."""
    kind = torch.device(world.device).type
    done = children(world, str(HERE / "lost_peer.py"), "shared killed", kind)
    if world.rank == world.size // 2:
        assert done.returncode == -9, done.stderr[-2000:]
        return
    assert done.stdout.strip(), done.stderr[-2000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["error"] == "PeerLost" and said["ranks"] == [world.size // 2], said
    assert said["seconds"] < 30, said
