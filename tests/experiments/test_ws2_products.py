"""By what the products of a record were computed, on made-up rows."""

from __future__ import annotations

import pytest

from rlkernel.experiments import ws2_coverage, ws2_products


def row(part, m, passed=True, grid=None, **schedules):
    """One row; a boundary `gate__dw` is gate.dw."""
    at = {"part": part, "m": m, "contract": "tree2.bf16", "nccl": "default", "hidden": 64,
          "intermediate": 128}  # fmt: skip
    case = {"grid": grid or {"dp": 1, "cp": 2, "tp": 2}, "seed": 11, "parameters": at}
    lines = [
        {"boundary": name.replace("__", "."), "track": part, "schedule": schedule,
         "contract": "tree2.bf16", "one_rank": [0, 8], "digests": ["0"]}
        for name, schedule in schedules.items()
    ]  # fmt: skip
    return {"case": case, "passed": passed, "result": {"lines": lines, "backend": "twin"}}


def said(rows):
    """(what is covered of it, what is not)."""
    covered, missing = ws2_coverage.lists(rows)
    texts = (ws2_products.SOME, ws2_products.EVERY)
    return [[x for x in some if x.startswith(texts)] for some in (covered, missing)]


def test_every_product_by_kernels():
    rows = [row("forward", 1, down__forward="decode"), row("backward", 1, gate__dw="tokens+tile")]
    assert said(rows) == [[
        "products by the deterministic Triton kernels: 2 of 2 (tile 1, decode 1, tokens 1)",
        "every product by the deterministic Triton kernels",
    ], []]  # fmt: skip


@pytest.mark.parametrize(
    "schedule, why",
    [("library", "by the library's GEMM"), ("twin", "by plain torch"), ("mystery", "by mystery")],
)
def test_one_that_is_not_is_named(schedule, why):
    rows = [row("forward", m, down__forward="hopper") for m in (1, 16)]
    rows += [row("backward", m, gate__dw=schedule, up__dw=schedule) for m in (128, 1024)]
    rows += [row("tp4", 16, grid={"dp": 1, "cp": 1, "tp": 4}, gate__dx=f"decode+{schedule}")]
    (some,), (every,) = said(rows)
    assert some == "products by the deterministic Triton kernels: 2 of 7 (hopper 2)"
    assert every.startswith(f"every product by the deterministic Triton kernels: 5 of 7 {why}")
    assert every.endswith(
        "(tree2.bf16 at M_local 128, 1024: gate.dw, up.dw; tp4 tree2.bf16 at M_local 16: gate.dx)"
    )


def test_products_of_rows_that_fail_and_of_one_track_do_not_count():
    rows = [row("forward", 1, down__forward="decode")]
    (some,), (every,) = said(rows)
    assert some.endswith(": 1 of 1 (decode 1)")
    assert every.endswith(": both tracks must be looked at, and hold")
    rows.append(row("backward", 1, passed=False, gate__dw="tokens"))
    (some,), (every,) = said(rows)
    assert some.endswith(": 1 of 2 (decode 1)") and every.endswith("and hold")


def test_no_product_is_no_statement():
    covered, (some, every) = said([])
    assert not covered and some.endswith(ws2_products.NEEDS)
