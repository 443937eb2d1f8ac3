"""Every hypothesis on values made by hand, and what must not be claimed."""

import pytest
import torch

from rlkernel.audit import PARTIAL, REPLICATED, shard
from rlkernel.audit.diagnose import Scene, diagnose

G = torch.Generator().manual_seed(0)
PARTS = [torch.randn(6, 8, generator=G) for _ in range(4)]
DENSE = sum(PARTS)
BEFORE = torch.randn(6, 8, generator=G)
BIAS = torch.randn(8, generator=G)


def scene(held, layouts=None, due=None, **rest):
    layouts = layouts or [REPLICATED] * len(held)
    due = due or [layout.take(DENSE) for layout in layouts]
    return Scene("here", held, due, layouts, **rest)


def shards(dim=0):
    layouts = [shard(dim, rank, 2) for rank in range(2)]
    return layouts, [layout.take(DENSE) for layout in layouts]


COLUMNS, SLICES = shards()
LANES = [shard(0, lane, 2) for lane in (0, 0, 1, 1)]  # 2 data-parallel lanes x 2 ranks
HALVES = [DENSE[:3], DENSE[3:]]
CROSSED = [PARTS[0][:3] + PARTS[0][3:], None]
CROSSED[1] = HALVES[0] + HALVES[1] - CROSSED[0]

EXPECTED = {
    "equal": scene([DENSE + 1e-7] * 4),
    "missing": scene(PARTS),
    "doubled": scene([DENSE * 4] * 4),
    "averaged": scene([DENSE / 4] * 4),
    "scaled": scene([DENSE * 0.37] * 4),
    "stale": scene([BEFORE] * 4, before=[BEFORE] * 4),
    "subset": scene([PARTS[0] + PARTS[1]] * 2 + [PARTS[2] + PARTS[3]] * 2),
    "swapped": scene(SLICES[::-1], COLUMNS),
    "sharded": scene([DENSE.chunk(2, 1)[r] for r in range(2)]),
    "wrong_group": scene(CROSSED * 2, LANES),
    "added_again": scene([DENSE + 3 * BIAS] * 4, vectors={"other": BIAS * 0, "bias": BIAS}),
    "unknown": scene([DENSE + part for part in PARTS]),
}
AS_PARTIALS = {
    "equal": scene(PARTS, [PARTIAL] * 4),
    "summed_already": scene([DENSE] * 4, [PARTIAL] * 4),
    "scaled": scene([p / 2 for p in PARTS], [PARTIAL] * 4),
    "stale": scene([BEFORE / 4] * 4, [PARTIAL] * 4, before=[BEFORE] * 4),
    "unknown": scene([BEFORE] * 4, [PARTIAL] * 4),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_cause_is_named(kind):
    finding = diagnose(EXPECTED[kind])
    assert finding.kind == kind, finding
    assert finding.sure == ("unsure" if kind == "unknown" else "certain"), finding
    assert finding.right == (kind == "equal")


@pytest.mark.parametrize("kind", AS_PARTIALS)
def test_the_cause_is_named_where_partials_were_expected(kind):
    assert diagnose(AS_PARTIALS[kind]).kind == kind


def test_the_sentence_names_ranks_and_why_one_knows():
    finding = diagnose(EXPECTED["missing"])
    assert "here: the sum over ranks {0, 1, 2, 3} is missing" in finding.sentence
    assert "predicts the ranks' values" in finding.sentence
    assert "bias is added 4 times instead of once" in diagnose(EXPECTED["added_again"]).sentence
    assert "{0, 2}, {1, 3} instead of {0, 1}, {2, 3}" in diagnose(EXPECTED["wrong_group"]).sentence
    assert "rank 0 holds that of rank 1" in diagnose(EXPECTED["swapped"]).sentence


@pytest.mark.parametrize(("kind", "factor"), [("doubled", 2), ("averaged", 1 / 2)])
def test_a_sum_over_some_of_the_ranks_has_their_number(kind, factor):
    """2 x 2 replicas: what a sum over two of them is, run twice, is twice too large."""
    finding = diagnose(scene([DENSE * factor] * 4))
    assert (finding.kind, finding.sure) == (kind, "certain")
    assert "over 2 of these 4 ranks" in finding.sentence
    assert diagnose(scene([DENSE * 3 * factor] * 4)).kind == "scaled"


def test_a_sum_within_parts_that_were_whole_already():
    lanes = [PARTS[0] + PARTS[1], PARTS[2] + PARTS[3]]
    finding = diagnose(scene([2 * lanes[0], 2 * lanes[1]] * 2))
    assert (finding.kind, finding.sure) == ("wrong_group", "certain")
    assert "over {0, 2}, {1, 3} instead of {0, 1}, {2, 3}" in finding.sentence
    assert diagnose(scene([3 * lanes[0], 3 * lanes[1]] * 2)).kind == "unknown"


def test_a_sum_over_ranks_that_hold_other_slices_too():
    finding = diagnose(scene([HALVES[0] + HALVES[1]] * 4, LANES))
    assert (finding.kind, finding.sure) == ("wrong_group", "certain")
    assert "over {0, 1, 2, 3} instead of {0, 1}, {2, 3}" in finding.sentence


OTHER = [torch.randn(6, 8, generator=G).double() for _ in range(4)]


def of_layers(*missing):
    """y = (sum of PARTS) + (sum of OTHER), of which the layers in `missing` were not summed."""
    layers = {"gate": [part.double() for part in PARTS], "up": OTHER}
    whole = {name: sum(own) for name, own in layers.items()}
    due = sum(whole.values())
    held = [due + sum(layers[n][rank] - whole[n] for n in missing) for rank in range(4)]
    shares = {name: (own, [whole[name]] * 4) for name, own in layers.items()}
    shares["odd"] = ([torch.ones(2, 2)] * 4, [torch.ones(2, 2)] * 4)
    return scene(held, due=[due] * 4, shares=lambda: shares)


@pytest.mark.parametrize("layer", ["gate", "up"])
def test_one_of_several_layers_without_its_sum(layer):
    finding = diagnose(of_layers(layer))
    assert (finding.kind, finding.sure) == ("missing", "certain")
    assert f"the sum over ranks {{0, 1, 2, 3}} of what comes from {layer} is missing" in (
        finding.sentence
    )


def test_all_layers_without_their_sum_and_none():
    everything = diagnose(of_layers("gate", "up"))
    assert everything.kind == "missing" and "comes from" not in everything.sentence
    assert diagnose(of_layers()).right
    doubled = of_layers("gate")
    doubled.held[2].add_(1)
    assert diagnose(doubled).kind == "unknown"


def test_two_explanations_are_unsure():
    """The step before was exactly twice this one: stale and doubled predict the same."""
    twice = DENSE * 2
    finding = diagnose(scene([twice] * 2, before=[twice] * 2))
    assert finding.sure == "unsure" and {finding.kind, *finding.also} == {"stale", "doubled"}


def test_replicas_are_summed_with_their_own_kind():
    layouts = [shard(0, index, 2) for index in (0, 0, 1, 1)]
    held = [HALVES[0] - 1, torch.ones(3, 8), HALVES[1] - 2, torch.full((3, 8), 2.0)]
    finding = diagnose(scene(held, layouts))
    assert finding.kind == "missing" and "{0, 1} and ranks {2, 3}" in finding.sentence


def test_one_wrong_rank_is_not_called_missing():
    held = [DENSE.clone() for _ in range(4)]
    held[2] = held[2] + 1
    assert diagnose(scene(held)).kind == "unknown"


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_no_number_is_wrong_and_unknown(broken):
    held = [DENSE.clone() for _ in range(4)]
    held[1][0, 0] = broken
    assert diagnose(scene(held)).kind == "unknown"


def test_bf16_is_judged_by_its_own_steps():
    dense = DENSE.bfloat16()
    due = [dense] * 4
    assert diagnose(scene([(DENSE * 1.002).bfloat16()] * 4, due=due)).right
    assert diagnose(scene([p.bfloat16() for p in PARTS], due=due)).kind == "missing"


def test_what_is_added_behind_the_sum_does_not_hide_the_cause():
    """y = sum + bias, and y = x + sum: the sum went wrong, the rest is whole on every rank."""
    for rest, where in ((BIAS, {"vectors": {"bias": BIAS}}), (BEFORE, {"whole": {"x": BEFORE}})):
        due = [DENSE + rest] * 4
        for kind, held in (
            ("missing", [part + rest for part in PARTS]),
            ("doubled", [DENSE * 4 + rest] * 4),
            ("averaged", [DENSE / 4 + rest] * 4),
        ):
            finding = diagnose(scene(held, due=due, **where))
            assert (finding.kind, finding.sure) == (kind, "certain"), finding
            assert "was added behind it" in finding.sentence


def test_a_bias_in_every_partial_and_one_that_is_due_behind_the_sum():
    due, vectors = [DENSE + BIAS] * 4, {"bias": BIAS}
    each = scene([p + BIAS for p in PARTS], [PARTIAL] * 4, due, vectors=vectors)
    assert "bias is added 4 times instead of once" in diagnose(each).sentence
    behind = diagnose(scene(PARTS, [PARTIAL] * 4, due, vectors=vectors))
    assert behind.right and "due once, behind the sum" in behind.sentence


def test_rounding_noise_is_no_gradient():
    tiny = [part * 1e-9 for part in PARTS]
    assert diagnose(scene(tiny, due=[DENSE * 1e-9] * 4, noise=1e-7)).right
    assert not diagnose(scene(tiny, due=[DENSE * 1e-9] * 4)).right
    assert not diagnose(scene(PARTS, noise=1e-7)).right


def test_a_coarser_block_is_judged_by_its_own_dtype():
    held = [DENSE * (1 + 1e-3)] * 4
    assert diagnose(scene(held, coarse=torch.bfloat16)).right and not diagnose(scene(held)).right


def test_no_number_beside_a_vector_of_that_width():
    held = [DENSE.clone() for _ in range(4)]
    held[1][0, 0] = float("nan")
    finding = diagnose(scene(held, vectors={"bias": BIAS}))
    assert finding.kind == "unknown" and "ranks {0, 2, 3} are right" in finding.sentence


def test_replicas_that_are_right_are_not_accused():
    layouts = [shard(0, index, 2) for index in (0, 0, 1, 1)]
    held = [HALVES[0], HALVES[0], HALVES[0], HALVES[1]]
    sentence = diagnose(scene(held, layouts)).sentence
    assert "rank 2 holds that of rank" in sentence and "rank 1" not in sentence.split(":")[1][:60]
