"""What was measured, where, by which code: the run folders on disk and everything that names them.

A leaf of the package: standard library only, importable from everywhere, no torch.
"""

from rlkernel.records.keys import digest, reuse_key
from rlkernel.records.machine import environment, label
from rlkernel.records.source import source_hash
from rlkernel.records.store import Record, RecordError, RunFolder, find, read, results_root

__all__ = [
    "Record",
    "RecordError",
    "RunFolder",
    "digest",
    "environment",
    "find",
    "label",
    "read",
    "results_root",
    "reuse_key",
    "source_hash",
]
