"""Audit of anybody's tensor-parallel block: which sum is missing?

boundaries.py says what a twin hands out, diagnose.py what its values mean, report.py runs a whole
audit, blocks.py watches the reconstructed blocks.
"""

from rlkernel.audit.boundaries import (
    PARTIAL,
    REPLICATED,
    Boundaries,
    Layout,
    Reference,
    laid_out,
    shard,
    trace,
)

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "Boundaries",
    "Layout",
    "Reference",
    "laid_out",
    "shard",
    "trace",
]
