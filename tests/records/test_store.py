"""Run folders under everything that can happen to a file and to the process that writes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlkernel.records import RecordError, RunFolder, find, machine, read, results_root
from rlkernel.records.store import append_lines, read_lines, write_json

ROOT = Path(__file__).resolve().parents[2]
RUN = {"parameters": {"n": [2]}, "case_keys": ["a", "b"]}


def row(key: str, **more) -> dict:
    return {"key": key, "passed": True, "result": {}} | more


def create(root: Path, **run) -> RunFolder:
    return RunFolder.create("toy", "5" * 8, "k" * 8, RUN | run, root)


def test_a_folder_exists_from_the_start(tmp_path):
    folder = create(tmp_path / "a {b} c" / "d")
    assert folder.path.parent == tmp_path / "a {b} c" / "d" / "toy"
    stamp, source8, key8 = folder.path.name.split("-")
    assert len(stamp) == len("20261129T214312Z") and (source8, key8) == ("55555555", "kkkkkkkk")
    record = read(folder.path)
    assert record.status == "running" and record.rows == [] and record.samples == []
    assert record.run["schema"] == 1 and record.parameters == {"n": [2]}
    assert (folder.path / "log").is_dir() and os.listdir(folder.path.parent) == [folder.path.name]


def test_the_same_request_twice_gets_two_folders(tmp_path):
    first, second = create(tmp_path), create(tmp_path)
    assert first.path != second.path
    assert [record.path for record in find("toy", tmp_path)] == [second.path, first.path]


def test_rows_come_back_in_the_order_of_the_cases(tmp_path):
    folder = create(tmp_path)
    for key in ("b", "a", "b"):
        folder.append_row(row(key, n=len(read(folder.path).rows)))
    rows = read(folder.path).rows
    assert [(r["key"], r["n"]) for r in rows] == [("a", 1), ("b", 2)], "the last row of a case wins"


def test_a_torn_last_row_is_not_there(tmp_path):
    folder = create(tmp_path)
    folder.append_row(row("a"))
    whole = (folder.path / "cases.jsonl").read_bytes()
    for cut in (1, 5, len(whole) - 1):
        (folder.path / "cases.jsonl").write_bytes(whole + whole[:-cut])
        assert [r["key"] for r in read(folder.path).rows] == ["a"], cut
    (folder.path / "cases.jsonl").write_bytes(whole[:20] + b"\n" + whole)
    with pytest.raises(RecordError, match=r"cases\.jsonl, line 1"):
        read(folder.path)


def test_a_row_behind_a_torn_one_takes_its_place(tmp_path):
    """Ranks started by hand again, on a folder that a power cut left."""
    folder = create(tmp_path)
    folder.append_row(row("a"))
    rows = folder.path / "cases.jsonl"
    for torn in (rows.read_bytes() + b'{"key": "b", "res', b'{"key": "a'):
        rows.write_bytes(torn)
        folder.append_row(row("b"))
        assert [r["key"] for r in read(folder.path).rows][-1] == "b"
    assert len(read(folder.path).rows) == 1


def test_a_full_disk_is_named_and_earlier_rows_stay(tmp_path):
    folder = create(tmp_path)
    folder.append_row(row("a"))
    (folder.path / "samples.jsonl").symlink_to("/dev/full")
    with pytest.raises(RecordError, match="cannot append to .*No space left on device"):
        folder.append_samples([{"key": "a", "rank": 0}])
    record = read(folder.path)
    assert [r["key"] for r in record.rows] == ["a"] and record.samples == []


LIMITED = """
import json, os, resource, sys
from rlkernel.records.store import RecordError, append_lines, read_lines, write_json
path = __import__("pathlib").Path(sys.argv[1])
append_lines(path / "rows", [{"n": 1}])
write_json(path / "run.json", {"n": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
for write in (
    lambda: append_lines(path / "rows", [{"n": "x" * 100}]),
    lambda: write_json(path / "run.json", {"n": "x" * 100}),
):
    try:
        write()
    except (RecordError, OSError) as error:
        print(type(error).__name__, error)
print(sorted(os.listdir(path)), read_lines(path / "rows"), (path / "run.json").read_text())
"""


def test_a_row_that_fits_in_part_is_taken_back(tmp_path):
    """The kernel writes 11 bytes of it and then refuses: a real short write."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first, second, left = out.split("\n", 2)
    assert first.startswith("RecordError cannot append to") and "too large" in first
    assert second.startswith("OSError")
    assert left.split() == ["['rows',", "'run.json']", "[{'n':", "1}]", "{", '"n":', "1", "}"]
    assert (tmp_path / "rows").read_bytes() == b'{"n": 1}\n'


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "toy").write_text("a file where the folder should be")
    with pytest.raises(RecordError, match="cannot create a run folder in"):
        create(tmp_path)


def test_what_is_not_json_is_refused_by_name(tmp_path):
    folder = create(tmp_path)
    with pytest.raises(RecordError, match="a row for cases.jsonl is not JSON: .*set"):
        folder.append_row(row("a", result={1, 2}))
    assert not (folder.path / "cases.jsonl").exists()


def test_nan_survives(tmp_path):
    folder = create(tmp_path)
    folder.append_row(row("a", result={"x": float("nan"), "y": float("inf")}))
    result = read(folder.path).rows[0]["result"]
    assert result["x"] != result["x"] and result["y"] == float("inf")


def test_a_reader_never_sees_half_of_run_json(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"n": 0, "pad": ""})
    done = threading.Event()

    def work():
        for n in range(200):
            write_json(path, {"n": n, "pad": "x" * (n * 100)})
        done.set()

    writer = threading.Thread(target=work)
    writer.start()
    reads = 0
    while not done.is_set():
        found = json.loads(path.read_text())
        assert len(found["pad"]) == found["n"] * 100
        reads += 1
    writer.join()
    assert reads > 10 and os.listdir(tmp_path) == ["run.json"]


def test_an_unknown_status_is_refused(tmp_path):
    folder = create(tmp_path)
    with pytest.raises(ValueError, match="unknown status 'done'"):
        folder.update(status="done")
    folder.update(status="ok", verdict={"passed": True})
    record = read(folder.path)
    assert record.status == "ok" and record.passed and record.exit_code == 0
    assert record.run["parameters"] == {"n": [2]}, "other fields stay"


@pytest.mark.parametrize(
    "fields, code",
    [
        ({"status": "ok", "verdict": {"passed": True}}, 0),
        ({"status": "ok", "verdict": {"passed": False}}, 1),
        ({"status": "skipped", "reason": "no GPU"}, 1),
        ({"status": "crashed", "exit_code": 3}, 3),
        ({"status": "timed-out", "exit_code": 4}, 4),
        ({"status": "interrupted", "exit_code": 130}, 130),
    ],
)
def test_exit_codes(tmp_path, fields, code):
    folder = create(tmp_path)
    folder.update(**fields)
    assert read(folder.path).exit_code == code
    assert read(folder.path).passed is (code == 0)


CREATE = """
import os, sys, time
from rlkernel.records import RunFolder
print(RunFolder.create("toy", "s" * 8, "k" * 8, {}, sys.argv[1]).path, flush=True)
time.sleep(60)
"""


def test_running_without_its_process_reads_killed(tmp_path):
    command = [sys.executable, "-c", CREATE, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        path = child.stdout.readline().strip()
        assert read(path).status == "running"
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped yet
        assert read(path).status == "killed"
    record = read(path)
    assert record.status == "killed" and record.run["status"] == "running"
    assert record.exit_code == 137 and not record.passed


def test_another_process_of_that_number_does_not_count():
    here = machine.identity()
    assert machine.alive(here)
    assert not machine.alive(here | {"token": "0" * 16}), "another start time or another boot"
    assert not machine.alive(here | {"pid": os.getppid()})
    assert not machine.alive(None) and not machine.alive({})


def test_find_passes_over_what_does_not_read(tmp_path):
    good = create(tmp_path)
    (tmp_path / "toy" / "broken").mkdir()
    (tmp_path / "toy" / "broken" / "run.json").write_text("{")
    (tmp_path / "toy" / "empty").mkdir()
    (tmp_path / "toy" / ".new-abc").mkdir()
    assert [record.path for record in find("toy", tmp_path)] == [good.path]
    assert find("nothing", tmp_path) == []
    with pytest.raises(RecordError, match="no record here"):
        read(tmp_path / "toy" / "empty")
    with pytest.raises(RecordError, match="does not read"):
        read(tmp_path / "toy" / "broken")


def test_a_device_is_no_file_of_rows(tmp_path):
    (tmp_path / "rows").symlink_to("/dev/zero")
    assert read_lines(tmp_path / "rows") == []


def test_nothing_to_append_makes_no_file(tmp_path):
    append_lines(tmp_path / "rows", [])
    assert not (tmp_path / "rows").exists()


def test_where_results_go(tmp_path, monkeypatch):
    monkeypatch.setenv("RLKERNEL_RESULTS", str(tmp_path))
    assert results_root() == tmp_path
    monkeypatch.delenv("RLKERNEL_RESULTS")
    assert results_root() == ROOT / "results"
