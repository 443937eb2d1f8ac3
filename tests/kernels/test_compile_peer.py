"""The kernels of rounds compiled for sm_90: whole vectors, released flags, acquired waits.

Under this Python's Triton and under Triton 3.6.
"""

from __future__ import annotations

import json

import pytest

from tests.kernels.tritons import run_script, tritons

COMPILES = ("compile_peer.py",)


@pytest.fixture(scope="module", params=tritons())
def kernels(request):
    """The rows of compile_peer.py."""
    return [json.loads(line) for line in run_script(request.param, COMPILES).splitlines()]


@pytest.mark.timeout(1500)
def test_all_forms_are_there_and_no_data_spills(kernels):
    assert {row["kernel"].split()[0] for row in kernels} == {
        "words", "once", "rows", "twice", "gather",
    }  # fmt: skip
    for row in kernels:
        # Where seven peers are awaited one after the other, barriers of diverging threads are kept.
        barriers = 8 if row["kernel"].startswith("words P=8") else 0
        assert row["spills"] <= barriers and row["stack"] <= 2 * barriers, row


@pytest.mark.timeout(1500)
def test_slots_are_read_and_written_as_whole_vectors(kernels):
    """Volatile, 16 bytes a thread; a word that carries its epoch is 8 bytes that cannot tear."""
    for row in kernels:
        words = row["kernel"].startswith("words")
        load, store = ("v2.b64", "v2.b64") if words else ("v4.b32", "v4.b32")
        assert row["ptx"][f"ld.volatile.global.{load}"] > 0, row
        assert row["ptx"][f"st.global.{store}"] > 0, row


@pytest.mark.timeout(1500)
def test_a_flag_is_released_behind_the_data_and_acquired_ahead_of_it(kernels):
    """A fence, then a flag to each peer; the host's word is one more store of that kind."""
    for row in kernels:
        counts, peers = row["ptx"], int(row["kernel"].split("P=")[1].split()[0]) - 1
        if row["kernel"].startswith("words"):
            assert counts["fence.acq_rel.sys"] == 0, row
        else:
            assert counts["fence.acq_rel.sys"] >= 1, row
            assert counts["st.relaxed.sys.global"] >= peers + 1, row
            assert counts["ld.acquire.sys.global"] >= peers, row


@pytest.mark.timeout(1500)
def test_no_multicast(kernels):
    assert all(row["ptx"]["multimem"] == 0 for row in kernels)
