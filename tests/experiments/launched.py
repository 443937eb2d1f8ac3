"""What the experiments' tests share: one real launch, and picking rows of its record."""

from __future__ import annotations


def measure(experiment, root, **given):
    """A record of real ranks, in a results folder of the test's own."""
    from rlkernel.run import launch

    return launch.measure(experiment, given, root=root, timeout_s=280, peer_timeout_s=20)


def select(record, **wanted):
    """Rows whose case has these values; tp, dp and the case's parameters count as its own."""
    return [row for row in record.rows if wanted.items() <= _flat(row["case"]).items()]


def _flat(case):
    rest = {k: v for k, v in case.items() if k not in ("grid", "parameters")}
    return {**rest, **case["grid"], **case["parameters"]}
