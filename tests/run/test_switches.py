"""Which settings a record tells of, and which ranks on several nodes are given."""

import json
import os

import pytest

from rlkernel.collectives.groups import World
from rlkernel.run import launch, switches, worker
from rlkernel.run.switches import HIGH_PRIORITY


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (*switches.NAMES, "NNODES"):
        monkeypatch.setenv(name, "so that it is put back")
        monkeypatch.delenv(name)


def test_switches_that_are_set_are_told_and_no_others(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("SECRET_TOKEN", "mine")
    assert switches.told() == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def joined_with(agents: int, device: str, monkeypatch) -> str | None:
    """What a rank under so many agents has when it makes its process groups."""

    class Here(Exception):
        pass

    def join(*_):
        raise Here

    monkeypatch.setenv("GROUP_WORLD_SIZE", str(agents))
    monkeypatch.setattr(World, "join", join)
    spec = {"experiment": "rlkernel.experiments.exchange", "backend": "", "device": device}
    with pytest.raises(Here):
        worker.work({**spec, "peer_timeout_s": 5.0}, None)
    return os.environ.get(HIGH_PRIORITY)


def recorded(nodes: int, device: str, root) -> str | None:
    spec = launch.prepare("exchange", {"nodes": nodes, "device": device, "nproc": (2,)}, root=root)
    run = json.loads((spec.parent / "run.json").read_text())
    return run["environment"]["variables"].get(HIGH_PRIORITY)


@pytest.mark.parametrize("shell, given", [(None, "1"), ("0", "0")])
def test_between_nodes_nccl_goes_first_unless_the_shell_says_otherwise(
    shell, given, monkeypatch, tmp_path
):
    if shell:
        monkeypatch.setenv(HIGH_PRIORITY, shell)
    assert recorded(2, "cuda", tmp_path) == given
    assert joined_with(2, "cuda", monkeypatch) == given


@pytest.mark.parametrize("count, device", [(1, "cuda"), (2, "cpu")])
def test_elsewhere_the_priority_is_left_alone(count, device, monkeypatch, tmp_path):
    assert recorded(count, device, tmp_path) is None
    assert joined_with(count, device, monkeypatch) is None
