"""The GEMMs with the exchange inside compile for sm_90a: wgmma, nothing serialised, no spill in a
loop, and the synchronisation that the protocol rests on is in the text.
"""

from __future__ import annotations

import json

import pytest

from tests.kernels.tritons import run_script, tritons

pytestmark = pytest.mark.timeout(1500)  # seconds of work, on cores that others use as well
SHARED_MEMORY = 232448  # bytes a block may have on an H100 or H200
HANDFUL = (
    "arriving/forward/256/boxes",
    "arriving/forward/256/pointers",
    "arriving/backward/256/boxes",
    "leaving/forward/256",
    "leaving/forward/256/timeline",
    "leaving/forward/256/local",
    "arriving/forward/128/16",
)
COMPILES = ("compile_a2a.py", "=", *HANDFUL)


@pytest.fixture(scope="module", params=tritons())
def kernels(request):
    return json.loads(run_script(request.param, COMPILES))


def test_the_handful_is_what_was_compiled(kernels):
    assert set(kernels) == set(HANDFUL)


@pytest.mark.parametrize("name", HANDFUL)
def test_kernel_is_fit_for_the_device(kernels, name):
    kernel = kernels[name]
    assert kernel["hgmma"] > 0
    assert kernel["local"] <= 3  # the number of a thread, kept once around the producer's loop
    assert kernel["warnings"] == []
    assert kernel["registers"] <= 168
    assert kernel["smem"] <= SHARED_MEMORY


@pytest.mark.parametrize("name", HANDFUL)
def test_flags_are_acquired_and_released_at_system_scope(kernels, name):
    kernel = kernels[name]
    waits = not name.endswith("local")
    assert (kernel["acquires"] > 0) == waits
    assert (kernel["proxy_fences"] > 0) == waits
    assert (kernel["releases"] > 0) == (waits and name.startswith("leaving"))


@pytest.mark.parametrize("name", [n for n in HANDFUL if n.startswith("leaving")])
def test_results_leave_in_whole_lines(kernels, name):
    assert kernels[name]["wide_stores"] > 0 and kernels[name]["narrow_stores"] == 0
