"""Each page shows what its question needs: verdicts, figures in words, commands."""

from __future__ import annotations

import re

from rlkernel import records
from tests.pages.test_report import Page, read


def test_the_swiglu_page_shows_what_it_must(built):
    page = Page(read(built.folder, "01_tp_swiglu"))
    for text in (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "who holds it",
        "first wrong output",
        "first wrong input_grad",
        "P=8 bf16 SP: equivalent",
        "COVERED",
        "NOT COVERED",
        "results/tp-swiglu/",
    ):
        assert text in page.text, text
    starts = [alt.split(".")[0][:24] for alt in page.alts]
    assert starts == [
        "Data path of the block o", "Largest difference to th", "Heat map of signal by fa",
        "Heat map of signal by fa", "Cumulative share of elem",
    ]  # fmt: skip


def test_the_attention_page_shows_what_it_must(built):
    page = Page(read(built.folder, "02_tp_gqa"))
    for text in (
        "columns of Wo",
        "ranks 2, 3",  # who sums the gradients of a KV head's copies
        "ColumnParallelLinear",
        "largest of 5",
        "P=2 fp32 torch: equivalent",
        "missing_kv_reduce: caught",
        "P=8 bf16 SP: equivalent",
        "NOT COVERED",
    ):
        assert text in page.text, text
    starts = [alt.split(".")[0][:18] for alt in page.alts]
    assert starts == [
        "Ownership of heads", "Data path of the b", "Largest difference", "Heat map of signal",
        "Heat map of signal", "Cumulative share o",
    ]  # fmt: skip


def test_the_audit_page_shows_what_it_must(built):
    page = Page(read(built.folder, "03_which_sum"))
    for text in (
        "norm.grad: the sum over ranks {0, 1, 2, 3} is missing",
        "input.grad: the sum over ranks {0, 1, 2, 3} is missing",  # the example's
        "return laid_out(trace(mlp, x, target), where)",
        "torch's GQA",
        "NOT COVERED",
    ):
        assert text in page.text or text in " ".join(page.alts), text
    said = next(alt for alt in page.alts if alt.startswith("What the audit said"))
    assert ", 0 unsure, 0 wrong" in said and "1 unsure" not in said
    found = records.find("audit", built.results)
    shown = [r for r in found if f"results/audit/{r.path.name}" in page.text]
    assert sum(len(r.rows) for r in shown if r.run["parameters"]["fault"] == "all") == 97


def test_the_determinism_page_shows_what_it_must(built):
    page = Page(read(built.folder, "04_determinism"))
    for text in (
        "Every schedule gives the contract's bits",
        "census M=17: tree8.fp32: all schedules agree",
        "forward tree2.bf16: the oracle's bits",
        "Computed here as this page was made",
        "(8, 64, 128)",  # the observation in FP16
        "ROCm (gfx942): compiles; not run",
        "NOT COVERED",
    ):
        assert text in page.text, text
    starts = [alt.split(".")[0][:22] for alt in page.alts]
    assert starts[0] == "The contracts as trees" and "Census of schedules ag" in starts
    assert {"One row inside batches", "One row in batches of ", "Relative L2 error to F"} <= {
        *starts
    }
    census = next(alt for alt in page.alts if alt.startswith("Census"))
    compared = re.findall(r"(\S+): (\d+) / (\d+) differ", census)
    named = ["tree8.bf16", "tree8.fp32", "tree2.bf16", "chain", "gate/up"]
    assert [name for name, *_ in compared] == named
    assert all(wrong == "0" and int(count) >= 50 for _, wrong, count in compared)


def test_the_cost_page_shows_what_it_must(built):
    page = Page(read(built.folder, "05_ffn_cost"))
    for text in (
        "layer tp2_cp2_sp M=32: dW down: one rank's bits, 8 variants",
        "no-grad: the training forward's bits",
        "Two fresh processes get one hash",
        "--layout tp4 --fault left-fold",
        "--layout tp2,tp2_sp --what time --transport nccl",
        "--what train --graph false",
        "NOT COVERED",
    ):
        assert text in page.text, text
    exact = [alt for alt in page.alts if alt.startswith("Every rank's part of every result")]
    compared = re.findall(r"(\S+), M = 32: (\S+) / ([\d,]+)", exact[0])
    assert [name for name, *_ in compared] == ["tp2", "tp2_cp2_sp"]
    assert all(wrong == "0" and len(count) > 6 for _, wrong, count in compared)
    assert exact[1].count("M = 32") == 1 and "tp2_cp2_sp" in exact[1], "the menu's default"
    hashes = re.findall(r"\b[0-9a-f]{16}\b", page.text)
    twice = hashes[-4:]  # of the fresh processes, behind those of the layouts
    assert len(set(twice)) == 4 and set(twice) == set(hashes)


def test_the_page_of_two_nodes_shows_what_it_must(built):
    page = Page(read(built.folder, "06_ws2_two_nodes"))
    for text in (
        "Every boundary holds on both sides of its sum",
        "tree2.bf16 down.forward pre_reduce: the reference's bits",
        "refused: the TP group in the gradient slot",
        "2 real nodes x 2 GPUs each, 4 ranks: needs two machines with two GPUs each",
        "RMSNorm + GEMM",
    ):
        assert text in page.text, text
    starts = [alt.split(" ")[0] for alt in page.alts]
    assert starts[:4] == ["Ranks", "Boundaries", "Largest", "Median"]
    assert "on one host" in page.alts[0] and ": fails" not in page.alts[1]
