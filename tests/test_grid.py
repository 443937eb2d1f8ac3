"""Grid: ranks, coordinates, groups and shards; what it refuses, and in which words."""

from itertools import product

import pytest

from rlkernel.grid import AXES, GROUP_AXES, Grid

SIZES = [Grid(dp, cp, tp) for dp, cp, tp in product((1, 2, 4), repeat=3)]


@pytest.mark.parametrize("grid", SIZES, ids=str)
def test_rank_and_coordinates_are_inverse(grid):
    for rank in range(grid.size):
        at = grid.coords(rank)
        assert grid.rank(at.dp, at.cp, at.tp) == rank
        assert rank == (at.dp * grid.cp + at.cp) * grid.tp + at.tp


@pytest.mark.parametrize("grid", SIZES, ids=str)
@pytest.mark.parametrize("axis", GROUP_AXES)
def test_groups_partition_the_ranks(grid, axis):
    groups = grid.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
    assert {len(group) for group in groups} == {grid.axis_size(axis)}
    assert all(grid.group_of(rank, axis) == group for group in groups for rank in group)


def test_groups_of_the_two_by_two_grid():
    grid = Grid(cp=2, tp=2)
    assert grid.groups("tp") == ((0, 1), (2, 3))
    assert grid.groups("cp") == ((0, 2), (1, 3))


def test_grad_group_is_dp_major():
    assert Grid(dp=2, cp=2, tp=2).group_of(1, "grad") == (1, 3, 5, 7)


@pytest.mark.parametrize("size", [3, 0, -2, 6, 2.0, True, "2"])
@pytest.mark.parametrize("axis", AXES)
def test_sizes_that_are_no_power_of_two_are_refused_by_name(axis, size):
    with pytest.raises(ValueError, match=f"grid axis {axis}="):
        Grid(**{axis: size})


def test_shards_are_contiguous_and_uneven_ones_are_refused_by_name():
    grid = Grid(cp=2, tp=4)
    assert [grid.shard(12, "tp", rank, "F") for rank in (0, 3, 4)] == [
        slice(0, 3),
        slice(9, 12),
        slice(0, 3),
    ]
    with pytest.raises(ValueError, match="intermediate I=10 does not divide over tp=4"):
        grid.shard(10, "tp", 0, "intermediate I")


@pytest.mark.parametrize(
    ("ranks", "axis", "words"),
    [
        ((0, 2), "tp", r"not the tp group of rank 0 .* expected \[0, 1\]; that is rank 0's cp"),
        ((1, 0), "tp", r"\[1, 0\] is not the tp group"),
        ((0, 3), "cp", r"expected \[0, 2\]$"),
    ],
)
def test_a_foreign_group_is_refused_by_name(ranks, axis, words):
    grid = Grid(cp=2, tp=2)
    grid.check_group(grid.group_of(0, axis), axis, 0)
    with pytest.raises(ValueError, match=words):
        grid.check_group(ranks, axis, 0)


def test_unknown_axis_rank_and_coordinate():
    with pytest.raises(ValueError, match="unknown axis 'ep'"):
        Grid(tp=2).groups("ep")
    with pytest.raises(ValueError, match="rank 2 is outside grid tp2"):
        Grid(tp=2).coords(2)
    with pytest.raises(ValueError, match="coordinate tp=2"):
        Grid(tp=2).rank(tp=2)


def test_names():
    assert [str(g) for g in (Grid(), Grid(tp=2), Grid(dp=2, cp=2, tp=4))] == [
        "single",
        "tp2",
        "tp4_cp2_dp2",
    ]
    assert Grid(**Grid(2, 4, 8).to_dict()) == Grid(2, 4, 8)
