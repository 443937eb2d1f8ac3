"""The model of the layer on other fabrics: placements, the pipeline of chunks, errors, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.records import overlap_model as om
from rlkernel.records.alpha_beta import Fabric, LinkCost, NotEnough
from tests.figures import exchanges

NVLINK, NIC = LinkCost(20.0, 0.0, 380.0), LinkCost(30.0, 0.0, 50.0)
FABRIC = Fabric({"intra": NVLINK, "inter": NIC})
DEFAULT = om.Terms("default", 2, 64, 512 * 64 * 1280 * 2, 3400.0, 500.0, 360.0, 4260.0, {})
PLACEMENTS = [om.Placement(1, 8), om.Placement(2, 4), om.Placement(2, 8)]
gb_s = st.floats(1.0, 2000.0)


def test_bytes_of_the_documented_workload():
    """One exchange sends B T D 2 (P - 1) / P = 70 MiB a rank at P = 8."""
    ((messages, sent),) = om.Placement(1, 8).steps(DEFAULT.message)
    assert messages == {"intra": 7, "inter": 0} and sent["intra"] == 70 << 20
    ((messages, sent),) = om.Placement(2, 8).steps(DEFAULT.message)
    assert messages == {"intra": 7, "inter": 8}
    assert sent == {"intra": 35 << 20, "inter": 40 << 20}
    across, inside = om.Placement(2, 8).steps(DEFAULT.message, om.STEPS)
    assert across == ({"inter": 1}, {"inter": 40 << 20}), "as many bytes, one message for eight"
    assert inside == ({"intra": 7}, {"intra": 70 << 20})


def test_one_chunk_hides_nothing_and_many_hide_all_but_the_ends():
    assert om.pipelined_us(1, 100.0, 10.0) == 120.0
    assert om.pipelined_us(10, 100.0, 1.0) == pytest.approx(102.0)
    assert om.pipelined_us(4, 1.0, 10.0) == 80.0, "the links are never idle"


@settings(max_examples=100, deadline=None)
@given(chunks=st.integers(1, 64), comp=st.floats(0, 1e4), part=st.floats(0, 1e3))
def test_a_pipeline_is_no_shorter_than_either_resource_nor_longer_than_both(chunks, comp, part):
    length = om.pipelined_us(chunks, comp, part)
    assert length == pytest.approx(max(comp + 2 * part, 2 * chunks * part))
    assert length <= comp + 2 * chunks * part + 1e-6


@settings(max_examples=100, deadline=None)
@given(where=st.sampled_from(PLACEMENTS), order=st.sampled_from([om.FLAT, om.STEPS]),
       near=gb_s, far=gb_s, faster=st.floats(1.0, 50.0), chunks=st.integers(1, 4))  # fmt: skip
def test_more_bandwidth_is_never_slower(where, order, near, far, faster, chunks):
    def told(scale_near: float, scale_far: float) -> om.Prediction:
        links = {"intra": LinkCost(20.0, 0.0, near * scale_near)}
        links["inter"] = LinkCost(30.0, 0.0, far * scale_far)
        return om.predict(DEFAULT, Fabric(links), where, chunks, order=order)

    slow = told(1.0, 1.0)
    for fast in (told(faster, 1.0), told(1.0, faster)):
        for name in ("serial_us", "overlap_us", "comm_us", "wire_us"):
            assert getattr(fast, name) <= getattr(slow, name) + 1e-6, name
    assert slow.exposed_us >= 0 and slow.hidden <= 1 + 1e-9 and slow.of_what_can_be <= 1 + 1e-9


def test_the_slower_class_of_link_decides_where_both_move_at_once():
    where = om.Placement(2, 8)
    flat = om.exchange_us(FABRIC, where, DEFAULT.message)
    assert flat == pytest.approx(30 + (40 << 20) / 50e3)
    in_turn = Fabric(FABRIC.links, at_once=False)
    assert om.exchange_us(in_turn, where, DEFAULT.message) == pytest.approx(
        flat + 20 + (35 << 20) / 380e3
    )
    small = 16 << 10
    each = Fabric({"intra": LinkCost(5, 0, 380), "inter": LinkCost(0, 20, 50)})
    assert om.exchange_us(each, where, small, om.STEPS) < om.exchange_us(each, where, small)
    assert om.exchange_us(each, where, 1 << 30, om.STEPS) > om.exchange_us(each, where, 1 << 30)


def test_the_terms_of_a_record():
    rows = [exchanges.row(), exchanges.row(backward=True), exchanges.row(timed=()),
            exchanges.row(fault="swapped-slices")]  # fmt: skip
    (told,) = om.terms(rows)
    assert told.message == DEFAULT.message and told.ranks == 2
    assert told.local_us == pytest.approx(0.9 * (exchanges.COMM - exchanges.WIRE))
    chunks, alone, own = told.chunked["sm-free/4"]
    assert chunks == 4 and own - alone == pytest.approx(160.0)
    hot = om.terms([exchanges.row(timed=("documented", "hot"))])
    assert hot[0].comp_us == exchanges.COMP, "the hot state, where there is one"


def test_every_measured_time_stands_beside_the_models():
    told = om.terms([exchanges.row()])
    found = {
        error.label.rpartition(": ")[2]: error
        for error in om.errors(told, FABRIC, om.Placement(1, 2))
    }
    assert set(found) == {"T wire", "T serial", *(f"T overlap {s}/4" for s in exchanges.SPEED)}
    wire = found["T wire"]
    assert wire.measured_us == pytest.approx(0.9 * exchanges.WIRE)
    assert wire.model_us == pytest.approx(2 * (20 + (40 << 20) / 380e3))
    assert wire.relative == pytest.approx(wire.model_us / wire.measured_us - 1)


def test_what_cannot_be_said_is_refused():
    with pytest.raises(NotEnough, match="was not measured on 2 x 4"):
        om.errors([DEFAULT], FABRIC, om.Placement(2, 4))
    with pytest.raises(NotEnough, match="inter links"):
        om.predict(DEFAULT, Fabric({"intra": NVLINK}), om.Placement(2, 4), 4)
    wrong = ((8, 0, "1 to 8 chunks"), (16, 8, "1 to 4"), (3, 1, "do not divide"))
    for ranks, chunks, says in wrong:
        with pytest.raises(ValueError, match=says):
            om.predict(DEFAULT, FABRIC, om.Placement(1, ranks), chunks)
    assert om.fitting(DEFAULT, om.Placement(2, 8), (1, 2, 4, 8)) == [1, 2, 4]
    assert om.fitting(DEFAULT, om.Placement(1, 3), (1, 2)) == []
