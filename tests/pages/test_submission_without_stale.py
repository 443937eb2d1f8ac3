"""A submission without what is older than the code says what it goes without."""

from __future__ import annotations

import pytest

from rlkernel.pages import submission
from tests.pages.test_submission import PLACES, gpu, row

TOLD = "Left out, since the code has changed since they were measured: a2a-ffn/old."


def test_what_is_left_out_is_named(tmp_path):
    fresh, old = (
        gpu(tmp_path / name, row(), finished="2026-11-30T00:00:00Z") for name in ("fresh", "old")
    )
    assert TOLD not in submission._document("proposal", [fresh])
    assert TOLD in submission._document("proposal", [fresh], [old])


def test_stale_records_are_left_out_where_that_is_asked_for(tmp_path, monkeypatch, capsys):
    for name in PLACES:
        monkeypatch.setenv(name, str(tmp_path))
    old = tmp_path / "published" / "a2a-ffn" / "old"
    gpu(old, row(), argv=["python", "-m", "rlkernel", "a2a-ffn"])

    class Measures(BaseException):
        """Nothing was refused: the demo is next."""

    def get(*_, **__):
        raise Measures

    monkeypatch.setattr(submission.evidence, "get", get)
    assert submission.main([]) == 1 and "a2a-ffn/old is stale" in capsys.readouterr().err
    with pytest.raises(Measures):
        submission.main(["--without-stale"])
