"""The decode kernels, compiled for machines that need not be here: what the compilers made of them.

Compiling and interpreting exclude each other in one process, so a script of its own compiles.
"""

from __future__ import annotations

import json

import pytest

from tests.kernels.tritons import run_script, tritons

pytestmark = pytest.mark.timeout(1500)  # seconds of work, on cores that others use as well
MOST_SHARED = {"sm90": 227 * 1024, "gfx942": 64 * 1024}


COMPILES = ("compile_decode.py",)


@pytest.fixture(scope="module", params=tritons())
def kernels(request):
    return json.loads(run_script(request.param, COMPILES))


def only(kernels, target, word=""):
    found = [row for row in kernels if row["target"] == target and word in row["name"]]
    assert found, f"no kernel named {word!r} for {target}"
    return found


def test_nothing_spills_and_everything_fits(kernels):
    for row in kernels:
        assert row["spills"] == 0, row
        assert row["shared"] <= MOST_SHARED[row["target"]], row


def test_every_product_runs_on_the_matrix_units(kernels):
    for row in only(kernels, "gfx942"):
        assert row["matrix"]["mfma"], row
    for row in only(kernels, "sm90"):
        short = row["block_n"] < 64  # fewer weight rows than a warp group takes
        assert row["matrix"]["HMMA" if short else "HGMMA"], row


def test_weights_stream_asynchronously(kernels):
    for row in only(kernels, "sm90"):
        assert row["async_copies" if "pointers" in row["name"] else "tma"], row
