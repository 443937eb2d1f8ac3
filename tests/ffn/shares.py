"""Weights that are loaded whole or by shares, and bytes that go through the host; on every rank."""

from __future__ import annotations

from rlkernel.collectives.transport import StagedTransport
from rlkernel.compare import bit_report
from rlkernel.ffn.module import NAMES, DeterministicFFN
from rlkernel.grid import Grid
from tests.ffn.inputs import WIDE, H, weights
from tests.kernels.inputs import matrix


def whole_weights_and_shares_load_alike(world):
    for grid in (Grid(tp=4), Grid(cp=2, tp=2)):
        comm = world.comm(grid)
        if comm is None:
            continue
        layer, other = (DeterministicFFN(*weights(seed), comm) for seed in (1, 2))
        whole = dict(zip(NAMES, weights(1)))
        assert all(bit_report(w, whole[n]) for n, w in layer.whole(layer.local()).items())
        for state in (whole, layer.state_dict()):
            other.load_state_dict(dict(zip(NAMES, weights(2))))
            assert not bit_report(other.gate_up, layer.gate_up)
            other.load_state_dict(state)
            assert bit_report(other.gate_up, layer.gate_up) and bit_report(other.down, layer.down)
        assert layer.state_dict()[NAMES[2]].shape == (H, WIDE // grid.tp)


def a_staged_transport_moves_the_same_bytes_and_says_so(world):
    comm = world.comm(Grid(tp=4))
    if comm is None:
        return
    plain = comm.links["tp"].transport
    staged, x = StagedTransport(plain.group, 20), matrix(3, 5, comm.rank)
    assert staged.name == "process-group/gloo, staged through the host"
    assert bit_report(staged.swap(x, comm.rank ^ 1), matrix(3, 5, comm.rank ^ 1))
    assert all(bit_report(part, matrix(3, 5, r)) for r, part in enumerate(staged.gather(x)))


CHECKS = (whole_weights_and_shares_load_alike, a_staged_transport_moves_the_same_bytes_and_says_so)
