"""measure(): one launch, rows as they end, nothing measured twice. Launches are shared."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from rlkernel.experiments.case import UsageError
from rlkernel.records import RunFolder, read, reuse_key
from rlkernel.records.source import closure, source_hash
from rlkernel.run import plan, watch, worker
from rlkernel.run.launch import RunError, measure
from tests.run import toy
from tests.run.launching import TOY, folders

WHOLE = {"nproc": "1,2", "seed": "0,1"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One launch that hosts grids of 1 and 2 ranks -> (root, record, progress lines)."""
    root = tmp_path_factory.mktemp("braces {and} spaces") / "not there yet"
    lines: list[str] = []
    record = measure(TOY, WHOLE, root=root, progress=lines.append, timeout_s=60, peer_timeout_s=5)
    return root, record, lines


@pytest.fixture
def no_launch(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("launched")

    monkeypatch.setattr(watch, "run_agent", refuse)


def test_one_world_hosts_every_grid(whole):
    _, record, _ = whole
    assert record.status == "ok" and record.passed and record.exit_code == 0
    sizes = [(row["case"]["grid"]["tp"], row["case"]["seed"]) for row in record.rows]
    assert sizes == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert {row["world"] for row in record.rows} == {2} == {record.run["topology"]["world"]}
    assert [row["result"]["ranks"] for row in record.rows] == [[0], [0], [0, 1], [0, 1]]


def test_threads_are_the_same_at_every_size(whole):
    assert {row["result"]["threads"] for row in whole[1].rows} == {"1"}
    assert whole[1].run["topology"]["threads_per_rank"] == 1


def test_rows_carry_where_and_how(whole):
    row = whole[1].rows[-1]
    assert set(row) == {
        *("key", "reuse", "case", "result", "passed", "seconds", "paths"),
        *("backend", "device", "world", "finished"),
    }
    assert (row["backend"], row["device"]) == ("gloo", "cpu") and row["seconds"] > 0
    assert "samples" not in row["result"]


def test_samples_of_every_rank(whole):
    record = whole[1]
    last = [s for s in record.samples if s["key"] == record.rows[-1]["key"]]
    assert [(s["rank"], s["value"]) for s in last] == [(0, 0), (0, 1), (1, 10), (1, 11)]


def test_progress_has_a_line_a_case(whole):
    lines = whole[2]
    assert lines[0] == "launching 2 ranks (gloo, cpu) for 4 of 4 cases"
    assert [line.split()[0] for line in lines[1:]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "tp2 fp32 seed 1 fault none" in lines[4] and lines[4].endswith("s ok")


def test_each_rank_has_a_log(whole):
    _, record, _ = whole
    assert "rank 0 is at seed 1" in record.log(0) and "rank 1 is at seed 1" in record.log(1)
    left = sorted(path.name for path in (record.path / "log").iterdir())
    assert left == ["agent.txt", "rank0.txt", "rank1.txt"]


def test_run_json_is_complete_and_tells_no_names(whole):
    root, record, _ = whole
    assert set(record.run) == {
        *("schema", "experiment", "status", "reason", "exit_code", "argv", "parameters", "cases"),
        *("case_keys", "source", "seam", "git", "environment", "topology", "backend", "device"),
        *("protocol", "protocol_hash", "verdict", "covered", "not_covered", "failures"),
        *("reused", "started", "finished", "seconds", "process"),
    }
    assert record.run["argv"] == ["python", "-m", "rlkernel", "toy", "--nproc", "1,2"]
    text = "".join(p.read_text() for p in record.path.iterdir() if p.suffix in (".json", ".jsonl"))
    for secret in (str(root), f"{Path.home()}/", f'"{socket.gethostname()}"', str(Path.cwd())):
        assert secret not in text


def test_asked_again_nothing_runs(whole, no_launch):
    root, record, _ = whole
    again = measure(TOY, toy.Params(nproc=(1, 2), seed=(0, 1)), root=root)
    assert again.path == record.path and again.rows == record.rows


def test_a_part_of_it_needs_no_launch_either(whole, no_launch):
    root, record, _ = whole
    part = measure(TOY, {"nproc": 2, "seed": "1,0"}, root=root)
    assert part.path != record.path and part.status == "ok" and part.run["reused"] == 2
    assert {row["reused_from"] for row in part.rows} == {record.path.name}
    assert [row["case"]["seed"] for row in part.rows] == [1, 0]
    assert len(part.samples) == 8


def test_other_parameters_are_another_record_of_the_same_rows(whole, no_launch):
    """A parameter that no case depends on, for example one of the verdict."""
    root, record, _ = whole
    other = measure(TOY, WHOLE | {"note": "x"}, root=root)
    assert other.path != record.path and other.parameters["note"] == "x"
    assert other.run["reused"] == 4


def test_all_rows_without_a_verdict_are_not_the_answer(whole, tmp_path, no_launch):
    """The launcher was killed between the last row and the end."""
    copy = RunFolder(shutil.copytree(whole[1].path, tmp_path / "toy" / "copy"))
    copy.update(status="running", verdict=None)
    assert read(copy.path).status == "running", "its process, this one, lives"
    record = measure(TOY, WHOLE, root=tmp_path)
    assert record.path != copy.path and record.passed and record.run["reused"] == 4


def test_force_measures_again(whole):
    root, record, _ = whole
    again = measure(TOY, {"nproc": 1, "seed": 0}, root=root, force=True, timeout_s=60)
    assert again.run["reused"] == 0 and "reused_from" not in again.rows[0]
    assert again.rows[0]["world"] == 1 and again.rows[0]["result"]["threads"] == "1"
    assert again.rows[0]["finished"] > record.run["finished"]
    both = measure(TOY, {"nproc": 1, "seed": "0,1"}, root=root)
    assert [r["reused_from"] for r in both.rows] == [again.path.name, record.path.name], "newest"


def test_other_code_is_measured_again(whole, monkeypatch):
    root = whole[0]
    assert plan.make(TOY, WHOLE, root, False).pending == []
    monkeypatch.setattr(plan, "source_hash", lambda name: "f" * 64)
    assert len(plan.make(TOY, WHOLE, root, False).pending) == 4


def test_other_code_between_the_ranks_is_measured_again(whole, monkeypatch):
    """The toy, as `wire`, is handed the seam and imports nothing of it."""
    for module in (TOY, "rlkernel.experiments.wire"):
        assert plan.SEAM not in closure(module)
    hashed = plan.source_hash
    other = lambda name: "f" * 64 if name == plan.SEAM else hashed(name)  # noqa: E731
    monkeypatch.setattr(plan, "source_hash", other)
    assert len(plan.make(TOY, WHOLE, whole[0], False).pending) == 4
    assert whole[1].run["seam"] == hashed(plan.SEAM)


def test_an_edited_kernel_between_the_ranks_is_another_seam(root, tmp_path):
    shutil.copytree(root / "rlkernel", tmp_path / "rlkernel")
    kernel = tmp_path / "rlkernel" / "kernels" / "peer_reduce.py"
    kernel.write_text(kernel.read_text() + "\n# a remark changes nothing\n")
    assert source_hash(plan.SEAM, tmp_path) == source_hash(plan.SEAM)
    kernel.write_text(kernel.read_text() + "\nEDITED = 1\n")
    assert source_hash(plan.SEAM, tmp_path) != source_hash(plan.SEAM)


@pytest.mark.parametrize("what", ["torch", "triton", "nccl", "cpu"])
def test_other_libraries_or_chip_are_measured_again(what):
    here = {"torch": "2", "triton": "3", "nccl": None, "cpu": "C", "gpus": []}
    assert reuse_key("k", "s", here) == reuse_key("k", "s", here | {"cores": 9})
    assert reuse_key("k", "s", here) != reuse_key("k", "s", here | {what: "other"})


def test_a_crash_costs_only_what_was_not_done(tmp_path, marked):
    asked = {"nproc": 2, "seed": "0,1,2", "fault": "raise", "at": 2}
    with pytest.raises(RunError) as caught:
        measure(TOY, asked, root=tmp_path, timeout_s=60, peer_timeout_s=5)
    broken = caught.value.record
    assert [row["case"]["seed"] for row in broken.rows] == [0, 1]
    lines: list[str] = []
    mended = measure(TOY, asked | {"fault": "none"}, root=tmp_path, progress=lines.append)
    assert mended.status == "ok" and mended.run["reused"] == 2
    assert [row.get("reused_from") for row in mended.rows] == [broken.path.name] * 2 + [None]
    assert "seed 0" not in mended.log(0) and "seed 2" in mended.log(0)
    assert lines[1].startswith("[3/3] ")


def test_a_rank_may_work_longer_than_peers_wait_in_a_collective(tmp_path, marked):
    """Between cases nobody stands in a collective, so only the whole launch has a limit there."""
    limits = {"timeout_s": 60, "peer_timeout_s": 3.0}
    record = measure(TOY, {"nproc": 2, "fault": "late", "seed": 0}, root=tmp_path, **limits)
    assert record.passed and len(record.samples) == 4


def test_a_failed_check_is_a_result(tmp_path, marked):
    record = measure(TOY, {"nproc": 1, "fault": "wrong"}, root=tmp_path, timeout_s=60)
    assert record.status == "ok" and not record.passed and record.exit_code == 1
    assert record.run["exit_code"] == 1 and record.run["verdict"]["passed"] is False
    assert record.run["failures"] == []


@pytest.mark.parametrize(
    "name, params, says",
    [
        (TOY, {"nproc": 3}, "nproc=3 is not possible"),
        (TOY, {"wrold_size": 4}, "unknown parameter wrold_size"),
        ("tp-swigul", {}, "did you mean tp-swiglu"),
        ("tests.run.no_such", {}, "no_such"),
    ],
)
def test_bad_usage_leaves_no_folder(tmp_path, no_launch, name, params, says):
    with pytest.raises(UsageError, match=says):
        measure(name, params, root=tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_another_thread_is_refused_by_name(tmp_path, no_launch):
    said: list[BaseException] = []

    def work():
        try:
            measure(TOY, {}, root=tmp_path)
        except UsageError as error:
            said.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(said[0]) and folders(tmp_path) == []


def test_what_this_machine_cannot_do_is_skipped(tmp_path, no_launch, monkeypatch):
    monkeypatch.setattr(plan, "place", lambda *_: ("cuda", "needs 2 GPU(s), this machine has 0"))
    monkeypatch.setattr(plan, "reuse_key", lambda *_: "reuse")
    record = measure(TOY, {"seed": 0}, root=tmp_path)
    assert record.status == "skipped" and record.exit_code == 1 and not record.passed
    assert record.run["reason"].startswith("needs 2 GPU(s)")


@pytest.mark.parametrize(
    "target, gpus, torch, device, skip",
    [
        (None, 0, "2.13.0+cpu", "cpu", False),
        ("auto", 2, "2.11.0+cu130", "cuda", False),
        ("auto", 1, "2.11.0+cu130", "cpu", False),
        ("auto", 2, "2.13.0+cpu", "cpu", False),
        ("cpu", 2, "2.11.0+cu130", "cpu", False),
        ("cuda", 2, "2.11.0+cu130", "cuda", False),
        ("cuda", 1, "2.11.0+cu130", "cuda", True),
    ],
)
def test_where_it_runs(target, gpus, torch, device, skip, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    params = type("P", (), {} if target is None else {"target": target})()
    environment = {"gpus": [{"name": "G"}] * gpus, "torch": torch}
    found, why = plan.place(params, toy.cases(toy.Params()), environment)
    assert found == device and bool(why) is skip


@pytest.mark.parametrize(("visible", "device"), [("", "cpu"), ("1", "cpu"), ("0,1", "cuda")])
def test_gpus_that_are_hidden_do_not_count(visible, device, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment = {"gpus": [{"name": "G"}] * 2, "torch": "2.11.0+cu130"}
    assert plan.place(toy.Params(), toy.cases(toy.Params()), environment)[0] == device


def test_progress_that_raises_ends_the_ranks(tmp_path, marked):
    def say(line):
        if line.startswith("[1/"):
            raise BrokenPipeError("nobody listens")

    with pytest.raises(BrokenPipeError):
        measure(TOY, {"nproc": 1, "wait_s": 0.3}, root=tmp_path, progress=say, timeout_s=30)
    record = read(folders(tmp_path)[0])
    assert record.status == "crashed" and "BrokenPipeError" in record.run["reason"]


def test_a_row_of_a_broken_folder_does_not_hide_the_others(whole, no_launch, tmp_path):
    """A torn row, as a power cut leaves it: that case is missing, its neighbours are not."""
    copy = shutil.copytree(whole[1].path, tmp_path / "toy" / "copy")
    rows = copy / "cases.jsonl"
    rows.write_bytes(rows.read_bytes()[:-40])
    asked = plan.make(TOY, WHOLE, tmp_path, False)
    assert [case.title for case, _ in asked.pending] == ["tp2 fp32 seed 1 fault none wait_s=0.0"]
    assert asked.complete is None and asked.world == 2


def test_the_command_asks_for_the_same():
    words = plan.command(toy, toy.Params(nproc=(1, 2), wait_s=0.5))
    assert words == ["python", "-m", "rlkernel", "toy", "--nproc", "1,2", "--wait-s", "0.5"]


def test_a_launch_does_not_inherit_who_its_launcher_is(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    env = watch._environment("cpu")
    assert env["OMP_NUM_THREADS"] == "1" and not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(env)
    assert "TORCHELASTIC_RUN_ID" not in env and os.environ["OMP_NUM_THREADS"] == "5"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert watch._environment("cuda")["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_multicast_is_off_whatever_the_shell_says(monkeypatch):
    """For the ranks of a launch, and for those of a torchrun that was typed by hand."""
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    for name in off:
        monkeypatch.setenv(name, {"0": "1", "1": "0"}[off[name]])
    assert watch._environment("cuda").items() >= off.items()
    seen = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(worker.lifeline, "die_with_parent", lambda *_: None)
    monkeypatch.setattr(worker, "_redirect", lambda *_: seen.append(dict(os.environ)))
    monkeypatch.setattr(worker, "_show_where_it_stood", lambda: None)
    monkeypatch.setattr(worker, "work", lambda *_: None)
    monkeypatch.setattr(worker.Path, "read_text", lambda _: "{}")
    assert worker.main(["spec.json"]) == 0 and seen[0].items() >= off.items()


def test_the_record_is_json_that_others_read(whole):
    text = (whole[1].path / "run.json").read_text()
    assert json.loads(text)["parameters"] == {
        "nproc": [1, 2],
        "fault": "none",
        "at": 0,
        "seed": [0, 1],
        "wait_s": 0.0,
        "note": None,
    }
