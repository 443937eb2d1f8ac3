"""What a record of a2a-ffn may be quoted for follows from its rows."""

from __future__ import annotations

import copy

from rlkernel.experiments import a2a_coverage, a2a_ffn, a2a_nodes


def line(schedule="kernel", rung="fused", chunks=1, **checked):
    said = {"max_abs": 0.0}
    return {"schedule": schedule, "rung": rung, "chunks": chunks, "path": f"{rung}: {schedule}",
            "variant": f"{schedule}/{chunks}", "forward": said, "whole batch": said,
            **checked}  # fmt: skip


def row(*lines, ranks=2, fault="none", passed=True, at=(), **result):
    parameters = {"backward": False, "block": True, "check_correctness": "bitwise",
                  "comp_only": False, "comm_scale": 1, "compute_scale": 1, **dict(at)}  # fmt: skip
    case = {"grid": {"dp": ranks}, "fault": fault, "parameters": parameters}
    return {"case": case, "passed": passed, "result": {"lines": list(lines), **result}}


def told(*rows):
    covered, missing = a2a_coverage.coverage(rows)
    assert len(covered) + len(missing) >= len(a2a_coverage.LINES) + len(a2a_coverage.NEVER)
    return "\n".join(covered), "\n".join(missing)


TIMES = {"documented": {"schedules": {"kernel/1": {}, "sm-free/4": {}}}}


def test_a_record_of_bits_claims_no_times():
    covered, missing = told(row(line(), line("with-sm", "chunks", 4)))
    assert "the whole batch (block): with-sm, kernel" in covered
    assert "times" not in covered and "profiler" not in covered
    assert "nothing here was timed" in missing and "no backward that was checked" in missing


def test_what_was_timed_and_traced_is_named_with_its_way_and_state():
    at = {"backward": True}
    covered, _ = told(row(line(), at=at, times=TIMES, seen={"none": []}, inside={"ranks": []}))
    assert "sm-free, kernel (forward and backward, documented)" in covered
    assert "what a profiler saw" in covered and "inside the fused kernels" in covered


def test_what_an_exchange_costs_a_product_is_covered_where_it_was_beside_one():
    beside = [{"beside": name} for name in ("alone", "copy engine", "NCCL", "copy engine")]
    covered, missing = told(row(line(), sharing=beside))
    assert "costs a product: copy engine, NCCL" in covered and "costs a product" not in missing
    assert "hardware counters need" in missing
    for one in (row(line()), row(line(), sharing=beside[:1])):
        covered, missing = told(one)
        assert "costs a product" not in covered and "costs a product: NOT MEASURED" in missing


def test_what_was_withheld_says_why_once():
    both = [row(line(), withheld="2 ranks share a GPU")] * 2
    assert told(*both)[1].count("NOT MEASURED, 2 ranks share a GPU") == 1
    assert "share" not in told(row(line()))[1]


def test_memory_and_other_settings_are_covered_by_their_fields_alone():
    times = {"hot": {"schedules": {"kernel/1": {}}, "others": {"eager": {}, "compiled": {}}}}
    covered, missing = told(row(line(), times=times, memory={"none": [1], "kernel": [1]}))
    assert "peak memory of each schedule" in covered and "peak memory" not in missing
    assert "none under other settings, labelled so: eager, compiled" in covered
    covered, missing = told(row(line(), at={"other_none": "eager"}, times=TIMES))
    assert "peak memory: not taken" in missing and "other settings" not in covered
    assert "none under other settings (torch's operators" in missing


def test_fused_is_covered_only_where_it_ran_between_ranks():
    covered, missing = told(row(line(rung="chunks")))
    assert "0 of 1 ran fused" in covered and "1 as chunks" in covered
    assert "none of these rows ran them" in missing
    covered, missing = told(row(line(), line(chunks=4), line(rung="chunks", chunks=8)))
    assert "2 of 3 ran fused" in covered and "the fused kernels, forward, on 2 ranks" in covered
    assert "none of these rows ran them" in told(row(line(), ranks=1))[1]
    assert "is the chunk pipeline" not in covered + missing


def test_gradients_say_by_which_rule():
    more = {"backward": {"input": {}}, "whole batch backward": {"input": {}}}
    at = {"backward": True}
    assert "gradients bit for bit" in told(row(line(**more), at=at))[0]
    at |= {"check_correctness": "approx"}
    covered, _ = told(row(line(**more), at=at))
    assert "gradients within the Frobenius limit" in covered and "bit for bit of" not in covered


def test_a_row_that_failed_covers_nothing():
    covered, _ = told(row(line(), passed=False, times=TIMES))
    assert covered == ""


def test_comp_only_scales_and_faults():
    alone = row(at={"comp_only": True}, comp_paths={"kernel/1": "fused: kernel, no communication"})
    covered, missing = told(alone, row(line(), at={"comm_scale": 2}))
    assert "without communication: fused" in covered and "padded to 2 times" in covered
    assert "compute-scale: only 1" in missing
    broken = row(line(), fault="early-chunk", passed=False)
    assert "broken is seen: early-chunk" in told(broken)[0]
    unseen = copy.deepcopy(broken) | {"passed": True}
    assert "none was planted and seen" in told(broken, unseen)[1]


def test_several_nodes_are_told_by_their_own_rule():
    assert told(row(line()))[1].startswith(a2a_nodes.MISSING)
    assert a2a_ffn.coverage(a2a_ffn.Params(), []) == a2a_coverage.coverage([])
