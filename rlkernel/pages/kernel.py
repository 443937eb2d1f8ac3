"""One notebook in one kernel process: papermill in process, and nothing left behind.

    this process ── papermill ── client ──ipc── kernel (own session) ── torchrun ── ranks

The kernel is always the interpreter that runs this module, whatever name the notebook was saved
under. It talks over sockets in a temporary folder, so no port is opened. It leads a process group
of its own, and that group is killed when the call ends, however it ends; the ranks below it follow
because each asked the system to be told when its parent dies.

A stop (Ctrl-C, SIGTERM, the time limit) first interrupts the kernel, so that the launcher in it can
end its ranks and write a status; what still runs after GRACE_S is killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill import execute_notebook
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError

GRACE_S = float(os.environ.get("RLKERNEL_GRACE_S", "8"))
ROOT = Path(__file__).resolve().parents[2]


class Stopped(BaseException):
    """A signal ended the run. Not an Exception: nothing on the way may take it for a failure."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@dataclass(frozen=True)
class Outcome:
    """How a notebook ended: `error` is None when every cell completed; exit_code as the
    command's.
    """

    path: Path
    seconds: float
    error: str | None = None
    exit_code: int = 0


class Manager(AsyncKernelManager):
    """Starts this very interpreter as the kernel and talks to it through files, not ports."""

    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "transport": "ipc"})
        self.group: int | None = None
        self.folder = tempfile.mkdtemp(prefix="rlk-")  # short: a socket's path holds 107 bytes
        self.connection_file = os.path.join(self.folder, "k.json")

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="python3", language="python")

    async def _async_launch_kernel(self, kernel_cmd, **kwargs) -> None:
        """Remember the group: what a cell left in it outlives the kernel, and the provisioner
        forgets the number as soon as the kernel is gone."""
        await super()._async_launch_kernel(kernel_cmd, **kwargs)
        self.group = self.provisioner.pid

    def kill(self) -> None:
        """End the kernel's process group; no error where it is gone."""
        self._signal(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def interrupt(self) -> None:
        self._signal(signal.SIGINT)

    def _signal(self, number: int) -> None:
        if self.group:
            try:
                os.killpg(self.group, number)
            except (ProcessLookupError, PermissionError):
                pass


class Watch:
    """Ends a running kernel on request: `stop` may come from a signal handler or from a timer."""

    def __init__(self, timeout: float | None):
        self.timeout, self.reason, self.number = timeout, None, None
        self.manager: Manager | None = None
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> Watch:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        if self.timeout:
            self._after(self.timeout, lambda: self.stop(f"longer than {self.timeout:g} s"))
        return self

    def __exit__(self, *_) -> None:
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop(self, reason: str) -> None:
        if self.reason and self.manager:  # asked twice: no more patience
            self.manager.kill()
        self.reason = self.reason or reason
        if self.manager:
            self.manager.interrupt()
            self._after(GRACE_S, self.manager.kill)

    def _on_signal(self, number: int, _frame) -> None:
        self.number = self.number or number
        self.stop(signal.Signals(number).name)

    def _after(self, seconds: float, call) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


class Client(PapermillNotebookClient):
    """papermill's client, looking at its socket again every second while it waits for a reply.

    A message sent meanwhile (widgets talk while their cell runs) can use up the one wake-up that
    the reply would have caused; a client that only sleeps then waits for ever.
    """

    async def async_start_new_kernel_client(self):
        client = await super().async_start_new_kernel_client()
        channel = client.shell_channel
        get = channel.get_msg

        async def get_msg(timeout: float | None = None):
            while timeout is None:
                try:
                    return await get(timeout=1.0)
                except Empty:
                    pass
            return await get(timeout=timeout)

        channel.get_msg = get_msg
        return client

    start_new_kernel_client = run_sync(async_start_new_kernel_client)


class Engine(NBClientEngine):
    """papermill's engine with our kernel; a cell in which the kernel died is marked as failed."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, watch, env, start_timeout=60, **_):
        _forget_places(nb_man.nb)
        manager = watch.manager = Manager()
        client = Client(
            nb_man,
            km=manager,
            kernel_name=kernel_name,
            timeout=None,  # Watch keeps the time
            startup_timeout=start_timeout,
            iopub_timeout=60,
        )
        at = _follow(nb_man)
        try:
            if watch.reason:
                raise DeadKernelError("stopped before the kernel was started")
            client.execute(env=env, cleanup_kc=True)
        except Exception as error:
            _mark(nb_man.nb, at[0], watch.reason or _sentence(error))
            raise
        finally:
            manager.kill()


papermill_engines.register("rlkernel", Engine)
# It warns of parameters whose annotation it cannot read; ours were checked before.
logging.getLogger("papermill").setLevel(logging.ERROR)


def run(
    notebook: Path, output: Path, parameters: dict, timeout: float | None, env: dict | None = None
) -> Outcome:
    """Execute `notebook` into `output` (absolute paths; the folder exists). Raises Stopped,
    OSError.

    `parameters` are typed. The executed notebook appears under its name only when it ended; until
    then, and after a SIGKILL of this process, it is found beside it as `<name>.running.ipynb`.
    """
    staging = output.with_name(f"{output.stem}.running.ipynb")
    start = time.monotonic()
    error, code = None, 0
    with Watch(timeout) as watch:
        try:
            execute_notebook(
                _literal(notebook),
                _literal(staging),
                {name: _plain(value) for name, value in parameters.items()},
                engine_name="rlkernel",
                kernel_name="python3",
                language="python",
                progress_bar=False,
                cwd=str(notebook.parent),
                watch=watch,
                env={**_environment(), **(env or {})},
            )
        except PapermillExecutionError as failure:
            error, code = f"{failure.ename}: {failure.evalue}", 1
        except (DeadKernelError, CellTimeoutError, RuntimeError) as failure:
            error, code = _sentence(failure), 3
    if staging.exists():
        os.replace(staging, output)
    if watch.number:
        raise Stopped(watch.number)
    if watch.reason:
        error, code = watch.reason, 4
    unfinished = None if error else _unfinished(output)
    if unfinished:
        error, code = unfinished, 3
    return Outcome(output, time.monotonic() - start, error, code)


def _environment() -> dict:
    """The kernel's environment: this package on its path, from wherever it is started."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    places = {n: os.environ.get(n) for n in ("RLKERNEL_RESULTS", "RLKERNEL_PUBLISHED")}
    extra = {name: str(Path(place).resolve()) for name, place in places.items() if place}
    return {**os.environ, **extra, "PYTHONPATH": path, "RLKERNEL_HEADLESS": "1"}


def _literal(path: Path) -> str:
    """papermill formats paths with the parameters: a brace in a path has to be doubled."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def _forget_places(nb) -> None:
    """The executed notebook is shared with its page: where it lay on this machine is not."""
    for name in ("input_path", "output_path"):
        nb.metadata.papermill[name] = Path(nb.metadata.papermill[name]).name


def _follow(nb_man) -> list[int]:
    """A one-element list that always holds the index of the cell last started."""
    at, start = [0], nb_man.cell_start

    def cell_start(cell, cell_index=None, **kwargs):
        at[0] = cell_index or 0
        return start(cell, cell_index, **kwargs)

    nb_man.cell_start = cell_start
    return at


def _mark(nb, index: int, sentence: str) -> None:
    cell = nb.cells[index]
    cell.metadata.papermill["status"] = "failed"
    cell.metadata.papermill["exception"] = True
    if cell.cell_type == "code":
        cell.outputs.append(
            nbformat.v4.new_output("error", ename="Stopped", evalue=sentence, traceback=[sentence])
        )


def _sentence(error: Exception) -> str:
    if isinstance(error, DeadKernelError):
        return "the kernel died"
    return f"{type(error).__name__}: {error}"


def _unfinished(path: Path) -> str | None:
    """papermill calls a notebook completed whose kernel was killed: look at every cell instead."""
    for index, cell in enumerate(nbformat.read(path, as_version=4).cells):
        status = cell.metadata.get("papermill", {}).get("status")
        ran = cell.cell_type != "code" or not cell.source.strip() or cell.execution_count
        if status != "completed" or not ran:
            return f"cell {index} did not complete (status {status})"
    return None
