"""A rank alone, its kernels played by the twin: where elements lie, and that a mistake shows."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch

from rlkernel.collectives.groups import alone
from rlkernel.kernels import a2a_reference
from rlkernel.overlap import fused_kernel, gemm_variants, preset_layer
from rlkernel.overlap.gemm_variants import Bench, Variant, variants
from rlkernel.overlap.layout import Layout
from rlkernel.overlap.preset_layer import LOCAL, NONE, SET, Layers
from tests.overlap.inputs import far
from tests.overlap.played import Stream

AT = Layout(batch=5, tokens=8, dim=144, hidden=288, ranks=2)
SWEEPS = {"lead": (0, 1, 32), "chunks": (1, 2), "programs": (4, 3), "raster": (2, 16), "bn": (128,)}
CPU = torch.device("cpu")


def bench(name="gemm1", at=AT, **more) -> Bench:
    return Bench(name, at, CPU, 3, **more)


def wrong(made: Bench, sweeps=SWEEPS) -> dict[str, int]:
    every = variants(made.name, made.at, sweeps, 4)
    return {one.name: made.differ(made.gemm(one), one.local) for one in every}


# -- the four GEMMs --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["gemm1", "gemm2", "dh", "dx"])
def test_every_variant_has_the_librarys_elements(name, ranks):
    made = bench(name, replace(AT, ranks=ranks))
    assert set(wrong(made).values()) == {0} and not made.memory.missed()


@pytest.mark.parametrize("name", ["gemm1", "gemm2", "dh", "dx"])
def test_swapped_slices_show_in_every_live_variant(name):
    found = wrong(bench(name, swapped=True))
    assert all(count for one, count in found.items() if one != gemm_variants.LOCAL)


@pytest.mark.parametrize("name", ["gemm2", "dx"])
def test_a_result_that_is_lost_or_strays_is_counted(name, monkeypatch):
    (chosen, *_) = variants(name, AT, {}, 4)
    made = bench(name)
    leaves = a2a_reference.A2AGemm._leaves

    def lost(self, out, owners, product, token, rank, rows, columns):
        if (token, rank) != (1, 1):
            leaves(self, out, owners, product, token, rank, rows, columns)

    def strays(self, out, owners, product, token, rank, rows, columns):
        leaves(self, out, owners, product, token, rank, rows, columns)
        leaves(self, out, owners, product, self.tokens, rank, rows, columns)

    for fault in (lost, strays):
        monkeypatch.setattr(a2a_reference.A2AGemm, "_leaves", fault)
        assert made.differ(made.gemm(chosen), False) >= AT.batch * AT.dim
    monkeypatch.setattr(a2a_reference.A2AGemm, "_leaves", leaves)
    assert made.differ(made.gemm(chosen), False) == 0, "poisoned anew"


def test_a_flag_that_is_missing_is_told():
    made = bench()
    made.memory._flags[0, :-1] = 0
    made.memory.signals = replace(made.memory.signals, limit_ns=10**7)
    (chosen, *_) = variants("gemm1", AT, {}, 4)
    made.differ(made.gemm(chosen), False)
    assert made.memory.missed()


def test_one_parameter_differs_from_the_chosen_schedule():
    at = Layout(512, 64, 1280, 7680, 2)
    found = variants("gemm1", at, {"lead": (0, 4, 32, 99), "programs": (132, 131, 500)}, 132)
    base = found[0].schedule
    assert [one.name for one in found] == ["chosen", "local", "lead 0", "lead 4", "lead 32",
                                           "programs 131"]  # fmt: skip
    assert base.lead not in (0, 4, 32) and found[1].local
    for one in found[2:]:
        assert replace(one.schedule, **{one.sweep: getattr(base, one.sweep)}) == base
        assert getattr(one.schedule, one.sweep) == one.value
    assert gemm_variants.chosen(base, 132)["programs"] == 132


def test_flops_and_what_the_library_is_asked_for():
    assert bench("dx").flops == 2 * (2 * 4 * 5) * 576 * 144
    assert list(bench("gemm2").library()) == ["bmm", "bmm + bias"]
    assert list(bench("dh").library()) == ["bmm"]


def test_resources_are_those_that_the_launch_holds():
    class Compiled:
        n_regs, n_spills = 168, 0

        def __getitem__(self, grid):
            def runner(*args, stream=None):
                return self, grid

            return runner

    gemm = types.SimpleNamespace(launch=types.SimpleNamespace(_again=Compiled()[1, 1, 1]))
    assert gemm_variants.resources(gemm) == {"registers": 168, "spills": 0}
    assert gemm_variants.resources(object()) == {"registers": None, "spills": None}
    assert Variant("chosen", None).sweep is None


# -- the layer -------------------------------------------------------------------------------------


@pytest.fixture
def layers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(fused_kernel, "A2AGemm", a2a_reference.A2AGemm)
    return Layers(replace(AT, dim=16, hidden=32), alone(), 3)


def approx(monkeypatch):
    """The twin's sums are not the library's: an element differs where it is far off."""

    def report(left, right):
        error = far({"x": left}, {"x": right}, 0.02)
        return types.SimpleNamespace(mismatches=len(error))

    monkeypatch.setattr(preset_layer, "bit_report", report)


def test_the_layer_with_flags_set_is_none_without_communication(layers, monkeypatch):
    approx(monkeypatch)
    wanted = layers.training(NONE)
    assert set(wanted) > {"output", "input", "w1", "wout", "bout", "norm_x.weight"}
    for way in (SET, LOCAL):
        found = layers.differ(way, wanted)
        assert found.keys() == wanted.keys() and not any(found.values()), (way, found)
    assert not layers.memory.missed()
    assert all(work() is not None for work in layers.variants("forward").values())


def test_what_does_not_come_shows_in_the_layer(layers, monkeypatch):
    approx(monkeypatch)
    wanted = layers.training(NONE)
    fill = layers.memory.fill
    monkeypatch.setattr(layers.memory, "fill", lambda which, rows: fill(which, rows, swapped=True))
    found = layers.differ(SET, wanted)
    assert found["output"] and found["input"] and found["w1"]
