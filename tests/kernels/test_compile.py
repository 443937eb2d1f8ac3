"""The portable kernels compiled for sm_90 and gfx942: matrix instructions there, no spills.

Under this Python's Triton and under Triton 3.6.
"""

from __future__ import annotations

import json

import pytest

from tests.kernels.tritons import run_script, tritons

COMPILES = ("compile_only.py",)


@pytest.fixture(scope="module", params=tritons())
def kernels(request):
    """The rows of compile_only.py."""
    return [json.loads(line) for line in run_script(request.param, COMPILES).splitlines()]


@pytest.mark.timeout(1500)  # about forty seconds of work a Triton, on cores that others use as well
def test_every_kernel_is_there_for_both_targets(kernels):
    nvidia, amd = (
        {row["kernel"] for row in kernels if row["target"] == target}
        for target in ("sm_90", "gfx942")
    )
    assert nvidia == amd and len(nvidia) > 15
    assert all(row["hsaco"] > 1000 for row in kernels if row["target"] == "gfx942")


@pytest.mark.timeout(1500)
def test_nothing_spills(kernels):
    for row in kernels:
        assert row["spills"] == 0 and row.get("stack", 0) == 0, row
        limit = 65536 if row["target"] == "gfx942" else 227 * 1024
        assert row["shared"] <= limit, row


@pytest.mark.timeout(1500)
def test_matrix_instructions(kernels):
    """wgmma from 64 rows a tile on, mma.sync below; MFMA on CDNA."""
    for row in kernels:
        if not row["kernel"].startswith("gemm_"):
            continue
        if row["target"] == "gfx942":
            assert row["mfma"] > 0, row
        elif row["config"]["block_m"] >= 64:
            assert row["sass"]["HGMMA"] > 0 and row["ptx"]["wgmma"] > 0, row
        else:
            assert row["sass"]["HMMA"] > 0, row


@pytest.mark.timeout(1500)
def test_no_joint_became_the_start_of_a_dot(kernels):
    """x + dot(a, b, 0) must not turn into dot(a, b, x): every joint is still an addition."""
    for row in kernels:
        if row["kernel"].startswith("gemm_tree"):
            _, shape, tree, _ = row["kernel"].split()
            leaves = 1 if tree == "chain" else int(tree[4 : tree.index(".")])
            present = min(leaves, int(shape.split("x")[2]))
            assert row["sums"] == present - 1 + 1, row  # and the zero that the dots start from


@pytest.mark.timeout(1500)
def test_every_leaf_of_few_tokens_is_a_product_of_its_own(kernels):
    """One wgmma a leaf from 16 k-slots and no zeroed accumulators; all joints are still there."""
    for row in kernels:
        if row["kernel"].startswith("gemm_tokens"):
            _, shape, tree, _ = row["kernel"].split()
            tokens, leaves = int(shape.split("x")[2]), 1 if tree == "chain" else int(tree[4:-5])
            leaves = min(leaves, 1 << (tokens - 1).bit_length())  # of one token: no more needed
            assert row["sums"] == leaves - 1, row
            if row["target"] == "sm_90":
                steps = max(1, tokens // leaves // 16)
                assert row["ptx"]["wgmma"] == leaves * steps, row


@pytest.mark.timeout(1500)
def test_joints_are_packed_on_hopper(kernels):
    """Two BF16 sums an instruction: 7 joints of a 128 x 128 tile over 256 threads are 224."""
    name = "gemm_tree 4096x4096x12288 tree8.bf16 bf16"
    (row,) = (row for row in kernels if (row["target"], row["kernel"]) == ("sm_90", name))
    assert row["sass"]["HADD2"] + row["sass"]["HFMA2"] == 224, row


@pytest.mark.timeout(1500)
def test_the_gate_of_the_default_width_stays_in_registers(kernels):
    """Six forward programs an SM; a backward row's copies run ahead of it; sums are packed."""
    rows = {row["kernel"]: row for row in kernels if row["target"] == "sm_90"}
    forward, backward = (rows[f"norm_gate {way} 7680"] for way in ("forward", "backward"))
    assert forward["registers"] <= 80 and backward["registers"] <= 128
    for row in (forward, backward):
        assert row["sass"]["LDL"] == row["sass"]["STL"] == 0, row
        assert row["sass"]["HADD2"] + row["sass"]["HFMA2"] >= 30, row  # two biases an instruction
    assert backward["sass"]["LDGSTS"] > 0, backward
