"""Which settings a record tells of."""

from rlkernel.run import switches


def test_switches_that_are_set_are_told_and_no_others(monkeypatch):
    for name in switches.NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("SECRET_TOKEN", "mine")
    assert switches.told() == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
