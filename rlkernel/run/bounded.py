"""A rendezvous store that answers soon or not at all.

Who asks whether a peer is there asks the store, over the same network. Where that is cut, without a
word to either end, torch's client waits for an answer for as long as the kernel does: minutes.
"""

from __future__ import annotations

import queue
import threading

SOON_S = 10.0  # for an answer that a sound store gives in a millisecond


class BoundedStore:
    """`set`, `check` and `add` raise RuntimeError when no answer comes within `soon_s`; all else,
    which has a time limit of its own, is the store's.
    """

    def __init__(self, store, soon_s: float = SOON_S) -> None:
        self.store, self.soon_s = store, soon_s

    def __getattr__(self, name: str):
        return getattr(self.store, name)

    def set(self, key: str, value) -> None:
        self._soon(self.store.set, key, value)

    def check(self, keys: list[str]) -> bool:
        return self._soon(self.store.check, keys)

    def add(self, key: str, amount: int) -> int:
        return self._soon(self.store.add, key, amount)

    def _soon(self, ask, *words):
        answers: queue.SimpleQueue = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((ask(*words), None))
            except Exception as error:  # for the caller's thread
                answers.put((None, error))

        threading.Thread(target=run, daemon=True).start()
        try:
            answer, error = answers.get(timeout=self.soon_s)
        except queue.Empty:
            raise RuntimeError(f"the store did not answer within {self.soon_s:g} s") from None
        if error is not None:
            raise error
        return answer
