"""Windows of hardware counters: what is made of the samples, and a sampler's process that answers,
fails, ends or is silent. The library is played; the process and its pipes are real.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import textwrap
import time

import pytest

from rlkernel.overlap import counters
from rlkernel.overlap.counters import Counters, CountersError, Window
from rlkernel.overlap.sampler import METRICS
from tests.processes import alive
from tests.run.launching import wait_for

PLAYED = """
    import os, sys, time
    from types import SimpleNamespace

    HOW = os.environ["PLAYED"]

    class Collector:
        def __init__(self, device):
            self.device, self.windows = device, 0
        def enable(self):
            if HOW == "refused":
                raise PermissionError("Insufficient privileges for PM sampling")
        def configure(self, metrics, sampling_interval):
            self.metrics, self.interval = metrics, sampling_interval
        def start(self):
            if HOW == "ends":
                print("the driver is gone", file=sys.stderr, flush=True)
                os._exit(7)
        def stop(self):
            self.windows += 1
        def decode(self, most):
            if HOW == "silent":
                time.sleep(600)
            count = most if HOW == "full" else 3
            return [SimpleNamespace(end_timestamp=1000 * self.windows + self.interval * n,
                                    metric_values=[10.0 * i + n for i in range(len(self.metrics))])
                    for n in range(count)]
        def disable(self):
            open(os.environ["PLAYED_END"], "w").write("disabled")
"""


@pytest.fixture
def played(tmp_path, monkeypatch):
    """played(how): the library as a package on the sampler's path."""
    for name in ("cupti", "cuda/bindings", "nvidia/cu13/lib"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "cupti/__init__.py").write_text("")
    (tmp_path / "cupti/pm_sampling.py").write_text(textwrap.dedent(PLAYED))
    (tmp_path / "cuda/bindings/driver.py").write_text("def cuInit(flags): return (0,)\n")
    # Any library that loads may stand for CUPTI's own.
    for name in ("libnvperf_host.so", "libnvperf_target.so", "libcupti.so.13"):
        (tmp_path / "nvidia/cu13/lib" / name).symlink_to(_a_library())
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PLAYED_END", str(tmp_path / "end"))
    monkeypatch.setattr(counters, "BESIDE", tmp_path)  # not where `make counters` may have put it

    def how(word: str = "well"):
        monkeypatch.setenv("PLAYED", word)
        return tmp_path / "end"

    return how


def _a_library() -> str:
    with open("/proc/self/maps") as maps:
        found = {line.split()[-1] for line in maps if "/libm.so" in line or "/libm-" in line}
    return found.pop() if found else ctypes.util.find_library("m")


def test_each_counter_has_a_name_of_its_own():
    assert len(set(METRICS.values())) == len(METRICS)


def test_two_windows_and_no_process_left(played):
    end = played()
    with Counters(0, 20) as reader:
        reader.start()
        first = reader.stop()
        reader.start()
        second = reader.stop()
    assert first.ns == (1000, 1020, 1040) and second.ns == (2000, 2020, 2040)
    assert set(first.values) == set(METRICS)
    assert first.values["dram_written"] == (10.0, 11.0, 12.0)
    assert reader.child.returncode == 0 and end.read_text() == "disabled"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("refused", "cannot be read: PermissionError: Insufficient privileges"),
        ("ends", "ended with 7: the driver is gone"),
        ("full", "more than 65536 intervals: take a longer interval"),
    ],
)
def test_what_goes_wrong_is_told(played, how, words):
    played(how)
    with pytest.raises(CountersError, match=words):
        with Counters(0, 20) as reader:
            reader.start()
            reader.stop()


def test_silence_ends(played, monkeypatch):
    played("silent")
    with Counters(0, 20) as reader:
        reader.start()
        monkeypatch.setattr(counters, "PATIENCE_S", 0.5)
        began = time.monotonic()
        with pytest.raises(CountersError, match="ended with -9"):
            reader.stop()
    assert time.monotonic() - began < 30 and reader.child.returncode == -9


def test_an_answer_in_time_lets_it_live_and_the_end_waits_no_longer(played, monkeypatch):
    played("silent")
    reader = Counters(0, 20)
    monkeypatch.setattr(counters, "PATIENCE_S", 1.0)
    reader.start()
    time.sleep(1.5)
    assert reader.child.poll() is None
    reader.child.stdin.write("stop\n")  # nobody reads the answer, which never comes
    reader.close()
    assert reader.child.returncode == -9


def test_a_reader_that_never_began_leaves_no_process(played, monkeypatch):
    """What raises as it is made has no with-block that would end its process."""
    played("refused")
    started, popen = [], counters.subprocess.Popen
    keep = lambda *a, **k: started.append(popen(*a, **k)) or started[-1]  # noqa: E731
    monkeypatch.setattr(counters.subprocess, "Popen", keep)
    with pytest.raises(CountersError):
        Counters(0, 20)
    assert [child.returncode for child in started] == [1]


def test_a_rank_that_is_killed_takes_its_sampler_along(played):
    played()
    code = """
        import sys, time
        from rlkernel.overlap import counters
        counters.BESIDE = sys.argv[1]
        reader = counters.Counters(0, 20)
        print(reader.child.pid, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(counters.BESIDE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        sampler = int(rank.stdout.readline())
        assert alive(sampler)
        rank.kill()
    wait_for(lambda: not alive(sampler), 20)


def test_it_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(counters, "BESIDE", tmp_path)
    monkeypatch.setattr(counters, "LIBRARY", "no_such_library")
    assert "make counters" in counters.missing()
    (tmp_path / "no_such_library").mkdir()
    assert counters.missing() is None
    monkeypatch.setattr(counters, "LIBRARY", "json")
    assert counters.missing() is None


def window(**more) -> Window:
    values = dict.fromkeys(METRICS, (0.0, 0.0, 0.0, 0.0))
    return Window((100, 200, 300, 400), values | more)


def test_between_keeps_the_intervals_that_end_inside():
    seen = window(dram_read=(1.0, 2.0, 4.0, 8.0)).between(100, 300)
    assert seen.ns == (200, 300) and seen.total("dram_read") == 6.0


def test_shares_and_clock_come_from_cycles():
    seen = window(cycles=(999.0, 150.0, 150.0, 150.0), sm_cycles=(0.0, 150.0, 75.0, 0.0))
    assert seen.mhz() == pytest.approx(1500)  # 450 cycles in 300 ns
    assert seen.between(100, 400).share("sm_cycles") == pytest.approx(0.5)
    assert window().share("sm_cycles") == 0.0
    assert Window((), dict.fromkeys(METRICS, ())).mhz() == 0.0


def test_a_lost_interval_is_a_gap():
    assert window().longest_gap() == 100
    assert Window((100, 200, 400), {}).longest_gap() == 200
    assert Window((), {}).longest_gap() == Window((5,), {}).longest_gap() == 0


def test_the_sampler_needs_no_torch():
    assert "torch" not in _imported("rlkernel.overlap.sampler")
    assert "torch" not in _imported("rlkernel.overlap.counters")


def _imported(module: str) -> str:
    code = f"import {module}, sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return " ".join(name for name in done.stdout.split() if "." not in name)
