"""torchrun, tied to the life of whoever launched it, with a report of who failed.

    python -m rlkernel.run.agent PARENT REPORT.json [torchrun's own arguments]

PARENT is the launcher's process number: when that process ends, by whatever signal, the kernel
sends SIGTERM here and torchrun ends its ranks. REPORT.json is written when a rank failed
({"failures": [{"rank", "exit_code", "ended", "error"}]}) or a signal came
({"signal": number}). Exit codes: torchrun's 0 and 1, 128+n for a signal.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from rlkernel.run import lifeline

SHUTDOWN_S = 3.0  # for a rank to end by SIGTERM; a stopped one never does
AGENT_PID = "RLKERNEL_AGENT_PID"  # tells the ranks who must be their parent


def main(argv: list[str]) -> int:
    parent, report, arguments = int(argv[0]), Path(argv[1]), argv[2:]
    lifeline.die_with_parent(signal.SIGTERM, parent)
    os.environ[AGENT_PID] = str(os.getpid())

    gc.disable()  # what these imports make stays, and little is made after them
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from rlkernel.records.store import write_json

    closing = _Closing()
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        write_json(report, {"failures": _failures(error.failures, closing.sent)})
        return 1
    except SignalException as error:
        write_json(report, {"signal": int(error.sigval)})
        return 128 + int(error.sigval)
    return 0


class _Closing(logging.StreamHandler):
    """Which signals torchrun itself sent: pairs of process number and signal.

    Its report does not tell its own from those that somebody else sent; its log does, by a warning
    with the process number before each one. It gives a rank 30 s to end; here it is killed sooner.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: set[tuple[int, int]] = set()
        logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
        logger.setLevel(logging.WARNING)  # an environment variable may have silenced it
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        pid = next((word for word in record.args or () if type(word) is int), None)
        if pid is not None and "closing signal" in record.msg:
            self.sent.add((pid, int(signal.SIGTERM)))
            timer = threading.Timer(SHUTDOWN_S, self._kill, [pid])
            timer.daemon = True
            timer.start()

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.sent.add((pid, int(signal.SIGKILL)))


def _failures(failures: dict, sent: set[tuple[int, int]]) -> list[dict]:
    return [
        {
            "rank": rank,
            "exit_code": failure.exitcode,
            "ended": (failure.pid, -failure.exitcode) in sent,
            "error": _error(failure.error_file_data),
        }
        for rank, failure in sorted(failures.items())
    ]


def _error(data: dict) -> dict | None:
    """What the rank wrote before it ended (see worker.leave_word), None where it could not."""
    message = data.get("message")
    return message.get("extraInfo") if isinstance(message, dict) else None


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for torchrun's helper threads: the ranks have ended, the report is written.
    os._exit(code)
