"""ws2 under two agents: what holds, what each fault is called, what may be concluded.

Two launches of four ranks run beside each other, once for all tests: the command line on sound
ranks, and all faults in one world, the rank that dies last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlkernel.__main__ as command_line
from rlkernel import records
from rlkernel.experiments import ws2, ws2_coverage
from rlkernel.experiments.case import UsageError, parse_params
from rlkernel.records.store import RunFolder
from rlkernel.run import launch, nodes, watch
from tests.experiments.launched import select

ROOT = Path(__file__).resolve().parents[2]
# As the page of two nodes asks, which then launches nothing.
SOUND = "forward,backward,packed,proofs,refusals,latency,layer,tp4,cp4,dp"
FEW = ("--m", "1,16", "--repeats", "20", "--message", "8192,262144", "--samples", "10")
BOUNDARIES = {"gate.forward", "up.forward", "down.forward", "gate.dx", "up.dx", "down.dh",
              "gate.dw", "up.dw", "down.dw", "gate_up.dx"}  # fmt: skip
SUMS = {name for name in BOUNDARIES if name.endswith((".dx", ".dw"))} | {"down.forward"}


@pytest.fixture(scope="module")
def launched(tmp_path_factory, shared_results):
    """(exit code, summary, record) of sound ranks, (error, record) of the faults."""
    command = [sys.executable, "-m", "rlkernel", "ws2", "--device", "auto", "--what", SOUND, *FEW]
    process = subprocess.Popen(
        [*command, "--json", "--results", str(shared_results), "--timeout", "250"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with pytest.raises(launch.RunError) as died:
        launch.measure(
            "tests.experiments.ws2_faults", {"m": "16", "device": "cpu"}, timeout_s=250,
            root=tmp_path_factory.mktemp("faults"), peer_timeout_s=4,
        )  # fmt: skip
    out, errors = process.communicate(timeout=280)
    assert out, errors
    sound = process.returncode, json.loads(out), records.find("ws2", shared_results)[0]
    return {"sound": sound, "faults": (died.value, died.value.record)}


# ---- sound ranks ---------------------------------------------------------------------------------


def test_every_boundary_holds_is_exit_0(launched):
    code, summary, record = launched["sound"]
    assert code == 0 and summary["passed"] and not summary["failed"], summary["failed"]
    assert {line["boundary"] for line in summary["boundaries"]} == BOUNDARIES
    for line in summary["boundaries"]:
        sides = {"local"} if line["boundary"] not in SUMS else {"pre_reduce", "post_reduce"}
        assert set(line["sides"]) == sides and line["hashes"] == 1
        for side in line["sides"].values():
            assert side["mismatches"] == 0 < side["elements"]
            assert side["p95"] <= side["p99"] <= side["max_abs"]


def test_groups_wire_and_contract_of_each_sum(launched):
    _, summary, record = launched["sound"]
    home = [line for line in summary["boundaries"] if line["contract"].startswith("tree2")]
    tp, cp = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    assert all(x["groups"] == (cp if x["boundary"].endswith("dw") else tp) for x in home)
    assert {(x["contract"], x["wire"]) for x in home} == {
        ("tree2.bf16", "bf16"), ("tree2.fp32", "fp32"),
    }  # fmt: skip
    refused = "refused: tree2.bf16 over 4 replicas"
    assert any(refused in check["name"] for check in record.run["verdict"]["checks"])
    wide = [x for x in summary["boundaries"] if x["contract"] in ("tree4.bf16", "tree8.bf16")]
    assert wide and all(x["groups"] == [[0, 1, 2, 3]] and x["reduction"] == "tree" for x in wide)


def test_it_never_calls_one_machine_two_nodes(launched):
    _, summary, record = launched["sound"]
    where = summary["topology"]
    assert (where["hosts"], where["nodes"]) == (1, 2)
    assert "one host" in where["kind"] and "one host" in summary["covered"][0]
    assert [rank["node"] for rank in where["ranks"]] == [0, 0, 1, 1]
    crossing = {tuple(g["ranks"]): g["crosses_nodes"] for g in where["groups"]}
    assert crossing == {(0, 1): False, (2, 3): False, (0, 2): True, (1, 3): True}
    assert any(line.startswith("2 real nodes") for line in summary["not_covered"])
    for line in summary["covered"]:
        assert ("inter-node" in line or "cross nodes" in line) == line.endswith(where["kind"])
    run = record.run["topology"]
    assert run["nodes"] == 1 and run["agents"] in (nodes.NAMESPACES, nodes.LOOPBACK)


def test_what_stands_in_the_report(launched):
    _, summary, record = launched["sound"]
    assert summary["backend"] == "twin" and summary["nccl"] is None
    assert summary["compute"] == "bfloat16 operands, FP32 accumulation"
    assert {"torch", "triton", "cuda", "nccl"} <= set(summary["versions"])
    assert record.run["covered"] == summary["covered"]
    assert record.run["not_covered"] == summary["not_covered"]
    (row,) = select(record, part="forward", m=16, contract="tree2.bf16")
    path = row["result"]["operator_paths"]["down.forward"]
    assert path == "backend_all_reduce tree2.bf16 over tp by process-group/gloo"
    assert row["result"]["nccl"] is None and row["result"]["compiled"] == []
    tokens = [own["tokens"] for own in row["result"]["layout"]]
    assert tokens == [[0, 16], [0, 16], [16, 32], [16, 32]]
    assert [own["features"][0] for own in row["result"]["layout"]] == [0, 64, 0, 64]
    header, body = ws2.table(ws2.Params(), record.rows)
    assert body and all(len(line) == len(header) for line in body)


def test_proofs_and_refusals_say_what_they_saw(launched):
    _, _, record = launched["sound"]
    (proofs,), (refusals,) = (select(record, part=part) for part in ("proofs", "refusals"))
    names = [name for name, *_ in proofs["result"]["checks"]]
    assert "down.dh: a sum over tp would be wrong" in names
    assert sum("over tp other coordinates would be added" in name for name in names) == 3
    assert sum("over cp other coordinates would be added" in name for name in names) == 3
    said = {name: value for name, _, value, _ in refusals["result"]["checks"]}
    assert len(said) == 13 and "it was not refused" not in said.values()
    assert said["refused: the TP group in the gradient slot"].endswith(
        "(rank 0 holds tp 0, rank 1 holds tp 1)"
    )


def test_latency_of_both_kinds_of_groups(launched):
    _, _, record = launched["sound"]
    (row,) = select(record, part="latency")
    kinds = {(line["axis"], line["way"], line["bytes"]) for line in row["result"]["lines"]}
    assert len(kinds) == 8 and all(line["median_us"] > 0 for line in row["result"]["lines"])
    assert len(record.samples) == 4 * 8 * 10


def test_another_launch_has_the_same_hashes(launched):
    """Fresh processes, the same seed: what the fault does not touch has the bits of sound ranks."""
    asked = {"m": 16, "contract": "tree2.bf16"}
    digests = [
        {line["boundary"]: line["digests"]
         for part in ("forward", "backward")
         for row in select(record, part=part, **asked) for line in row["result"]["lines"]}
        for record in (launched["sound"][2], launched["faults"][1])
    ]  # fmt: skip
    sound, faulty = digests
    assert len(sound) == 9 and {n for n in sound if sound[n] != faulty[n]} == {
        "down.forward", "down.dh",
    }  # fmt: skip


# ---- faults --------------------------------------------------------------------------------------


def faulty(launched, fault):
    return select(launched["faults"][1], fault=fault)


def test_swapped_shards_name_the_boundary_and_are_exit_1(launched, results, monkeypatch, capsys):
    """The command line concludes from the ranks' own rows; nothing is launched a second time."""
    rows = {row["key"]: row for row in faulty(launched, "swap-shards")}

    def played(folder, *_):
        for item in json.loads((folder / "spec.json").read_text())["cases"]:
            RunFolder(folder).append_row(rows[item["key"]] | {"reuse": item["reuse"]})
        return watch.Outcome(0)

    monkeypatch.setattr(watch, "run_agent", played)
    words = ["ws2", "--device", "cpu", "--fault", "swap-shards", "--m", "16", "--json"]
    assert command_line.main(words) == 1
    summary = json.loads(capsys.readouterr().out)
    assert summary["first_wrong"] == "down.forward pre_reduce: the reference's bits"
    assert "tree2.bf16 down.forward pre_reduce" in summary["failed"][0]
    assert "on ranks [0, 1]" in summary["failed"][0]
    wrong = {x["boundary"] for x in summary["boundaries"]
             if any(side["mismatches"] for side in x["sides"].values())}  # fmt: skip
    assert wrong == {"down.forward", "down.dh"}
    assert len(rows) == 4 and sum(not row["passed"] for row in rows.values()) == 3, "all but start"


def test_fp32_against_bf16_on_the_wire_is_named_on_every_rank(launched):
    *_, row = faulty(launched, "wire-dtype")
    checks = row["result"]["checks"]
    assert row["result"]["caught"] and not row["passed"] and len(checks) == 2
    for (name, held, said, _), (boundary, ranks) in zip(
        checks, (("down.forward", ("rank 0", "rank 1")), ("gate.dw", ("rank 0", "rank 2")))
    ):
        assert not held and name.startswith(boundary) and name.endswith("4 of 4 ranks")
        assert all(word in said for word in (*ranks, "bfloat16", "float32", "tree2.fp32"))


def test_other_nccl_settings_are_named_at_the_start(launched):
    (row,) = faulty(launched, "nccl-settings")
    assert [held for _, held, *_ in row["result"]["checks"]] == [False], "no rank went on to a sum"
    assert "rank 3: NCCL_PROTO is 'LL128', not unset" in row["result"]["checks"][0][2]
    assert not ws2.verdict(ws2.Params(fault="nccl-settings"), [row])["passed"]


def test_a_rank_lost_inside_a_sum_is_named(launched):
    error, record = launched["faults"]
    assert error.exit_code == 3 and record.status == "crashed"
    assert "rank 2 of 4 killed by SIGKILL" in str(error)
    reasons = {failure["rank"]: failure["reason"] for failure in record.run["failures"]}
    assert reasons[0].startswith("raised PeerLost: gate.dw") and "rank 2" in reasons[0]
    assert record.run["seconds"] < 60
    (start,) = faulty(launched, "lost-cp-rank")
    assert start["case"]["parameters"]["part"] == "start", "what was measured before stays"


def test_ranks_that_are_not_alike_go_no_further(monkeypatch):
    """Without a fault that asked for it, the launch ends as bad usage before any sum."""
    from rlkernel.ffn import deployment

    told = "rank 1: NCCL_ALGO is 'Tree', not unset"
    row = {"alike": False, "passed": False, "checks": [["settings", False, told, ""]]}
    monkeypatch.setattr(deployment, "start_row", lambda case, comm: row)
    (case, *_) = asked(fault="nccl-settings")
    assert ws2.run(case, None) is row
    with pytest.raises(UsageError, match="rank 1: NCCL_ALGO is 'Tree'"):
        ws2.run(asked()[0], None)


# ---- parameters ----------------------------------------------------------------------------------


def asked(**given):
    return ws2.cases(parse_params(ws2.Params, given))


@pytest.mark.parametrize(
    "given, says",
    [
        ({"m": "0"}, "at least 1 row"),
        ({"repeats": "1"}, "at least 2"),
        ({"message": "100"}, "multiple of 2048"),
        ({"nccl": "Ring/LL"}, "say device=cuda"),
        ({"what": "interpreted", "device": "auto"}, "say device=cpu"),
        ({"fault": "swap-shard"}, "did you mean swap-shards"),
        ({"what": "forwards"}, "did you mean forward"),
    ],
)
def test_what_cannot_run_is_refused(given, says):
    with pytest.raises(UsageError, match=says):
        asked(**given)


def test_cases_of_the_whole_question():
    found = asked(device="cpu")
    parts = [case.parameters["part"] for case in found]
    assert parts[0] == "start" and len({case.key for case in found}) == len(found)
    assert set(parts) == {*ws2.WHAT, "start"} - {"interpreted"}
    assert {case.grid.size for case in found} == {4, 8}
    interpreted = [case for case in found if "kernels" in case.parameters]
    assert [case.parameters["part"] for case in interpreted] == ["start", *ws2.TRACKS]
    assert {ws2.environment(case)["TRITON_INTERPRET"] for case in interpreted} == {"1"}
    assert {case.grid.size for case in asked(device="cuda", size="qwen3")} == {4}
    assert {case.parameters["m"] for case in asked(size="qwen3", what="forward")} == {
        1, 16, 128, 1024,
    }  # fmt: skip
    version_1 = [c for c in found if c.parameters.get("contract") == "tree2.bf16"]
    tracks = [c for c in version_1 if c.parameters["part"] in ("forward", "backward")]
    tracks = [case for case in tracks if case not in interpreted]
    assert {case.parameters["repeats"] for case in tracks} == {100}


def test_each_nccl_setting_is_a_launch_of_its_own():
    found = asked(device="cuda", nccl="default,Tree/LL", what="forward", m="1")
    told = {}
    for case in found:
        env = ws2.environment(case)
        told.setdefault((env.get("NCCL_ALGO"), env.get("NCCL_PROTO")), []).append(
            case.parameters["part"]
        )
        assert env["NCCL_DEBUG"] == "INFO"
    assert set(told) == {(None, None), ("Tree", "LL")}
    assert all(parts[0] == "start" and "forward" in parts for parts in told.values())
    for setting, rows, contracts in (("default", 3, 2), ("Tree/LL", 2, 1)):
        again = asked(device="cuda", nccl=setting, what="backward", m="1,16,128")
        mine = [c for c in again if c.parameters["part"] == "backward"]
        assert len(mine) == rows * contracts


# ---- coverage ------------------------------------------------------------------------------------


def test_each_statement_is_decided_once(launched):
    _, _, record = launched["sound"]
    covered, missing = ws2_coverage.lists(record.rows)
    every = [line.text for line in ws2_coverage.TOPOLOGY]
    every += [text for text, _ in ws2_coverage.NEVER]
    for text in every:
        told = [line for line in covered + missing if line.startswith(text)]
        assert len(told) == 1, (text, told)


def test_a_failed_row_is_not_covered(launched):
    _, _, record = launched["sound"]
    rows = json.loads(json.dumps(record.rows))
    assert ws2_coverage.complete(ws2.Params(what=("packed", "tp4")), rows)["passed"]
    for row in rows:
        if row["case"]["parameters"]["part"] == "tp4":
            row["passed"] = False
    _, missing = ws2_coverage.lists(rows)
    assert {"TP=4: a check failed", "TP groups that cross nodes: a check failed"} <= set(missing)
    for part, contract, text in (
        ("backward", "tree2.fp32", "FP32 partials and FP32 on the wire (tree2.fp32)"),
        ("forward", "tree2.bf16", "TP=2/CP=2 has the bits of TP=1/CP=1 under the same tree"),
    ):  # one row of several is enough
        again = json.loads(json.dumps(record.rows))
        next(iter(r for r in again if {"part": part, "contract": contract}.items()
                  <= r["case"]["parameters"].items()))["passed"] = False  # fmt: skip
        assert f"{text}: a check failed" in ws2_coverage.lists(again)[1]
    check = ws2_coverage.complete(ws2.Params(what=("packed", "tp4")), rows)
    assert not check["passed"] and check["value"] == "1 of 3, not TP groups that cross nodes"


def test_real_nodes_and_settings_are_read_from_the_rows(launched):
    _, _, record = launched["sound"]
    rows = json.loads(json.dumps(record.rows))
    start = next(row for row in rows if row["case"]["parameters"]["part"] == "start")
    start["result"]["topology"] |= {"kind": ws2_coverage.REAL, "hosts": 2, "gpus": 4}
    covered, _ = ws2_coverage.lists(rows)
    assert "2 real nodes x 2 GPUs each, 4 ranks" in covered
    assert "TP groups that cross nodes" in covered, "no longer said to be an emulation"
    assert not any(line.startswith("other NCCL") for line in covered)
    again = json.loads(json.dumps(rows))
    for number, some in enumerate((rows, again)):
        choice = [{"ranks": [0, 1], "transports": [], "choices": [f"ALLREDUCE 2 B: RING/{number}"]}]
        for row in some:
            row["case"]["parameters"]["nccl"] = ("default", "Ring/LL")[number]
            if row["case"]["parameters"]["part"] == "start":
                row["result"]["nccl"] = choice
    covered, _ = ws2_coverage.lists(rows + again)
    text = "other NCCL algorithms and protocols: the same bits"
    assert f"{text} (default: RING/0; Ring/LL: RING/1)" in covered
    for row in again:
        for line in row["result"].get("lines", ()):
            line["digests"] = ["other bits"]
    covered, missing = ws2_coverage.lists(rows + again)
    assert not any(line.startswith(text) for line in covered)
    assert sum(line.startswith(text) for line in missing) == 1
