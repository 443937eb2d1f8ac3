"""Who is where: the rank grid of data, context and tensor parallelism. Pure integers.

    Grid(dp=1, cp=2, tp=2)            rank = (dp * CP + cp) * TP + tp

                   tp=0   tp=1
                 +------+------+
          cp=0   |  0   |  1   |      tp groups (rows)     [0,1] [2,3]    one sum over features
                 +------+------+
          cp=1   |  2   |  3   |      cp groups (columns)  [0,2] [1,3]    one sum over tokens
                 +------+------+

    axis "grad" joins dp and cp: the ranks that hold the same weight shard and other tokens,
    dp-major.

The grid knows no placement: which ranks share a host is measured and recorded elsewhere. Every axis
is a power of two, because the sums over it follow a balanced binary tree (see contract.py);
anything else is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

AXES = ("dp", "cp", "tp")
GROUP_AXES = (*AXES, "grad", "world")


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands on each axis."""

    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Grid:
    """Sizes of the three axes. Raises ValueError for a size that is not a power of two."""

    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or not is_power_of_two(size):
                raise ValueError(
                    f"grid axis {axis}={size!r} is not supported: a sum over ranks follows "
                    f"a balanced binary tree, so {axis} must be a power of two (1, 2, 4, 8, ...)"
                )

    @property
    def size(self) -> int:
        return self.dp * self.cp * self.tp

    def __str__(self) -> str:
        """`tp2`, `tp2_cp2`, or `single` for one rank."""
        named = [
            f"{axis}{getattr(self, axis)}" for axis in ("tp", "cp", "dp") if getattr(self, axis) > 1
        ]
        return "_".join(named) or "single"

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    def rank(self, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        for axis, at in zip(AXES, (dp, cp, tp), strict=True):
            if not 0 <= at < getattr(self, axis):
                raise ValueError(
                    f"coordinate {axis}={at} lies outside grid {self}, "
                    f"where {axis} has {getattr(self, axis)}"
                )
        return (dp * self.cp + cp) * self.tp + tp

    def coords(self, rank: int) -> Coordinates:
        self._check_rank(rank)
        return Coordinates(
            dp=rank // (self.cp * self.tp), cp=rank // self.tp % self.cp, tp=rank % self.tp
        )

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of an axis, each in the order in which its sum runs."""
        self._check_axis(axis)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            found.setdefault(self._lane(rank, axis), []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The group of `axis` that `rank` belongs to."""
        self._check_rank(rank)
        return next(group for group in self.groups(axis) if rank in group)

    def axis_size(self, axis: str) -> int:
        self._check_axis(axis)
        return {"grad": self.dp * self.cp, "world": self.size}.get(axis) or getattr(self, axis)

    def shard(self, length: int, axis: str, rank: int, name: str) -> slice:
        """The contiguous slice of an axis of `length` that `rank` owns. Uneven shards are refused
        by `name`.
        """
        parts = self.axis_size(axis)
        if length % parts:
            raise ValueError(
                f"{name}={length} does not divide over {axis}={parts}: shards must be even"
            )
        step = length // parts
        at = self.group_of(rank, axis).index(rank)
        return slice(at * step, (at + 1) * step)

    def check_group(self, ranks: Sequence[int], axis: str, rank: int) -> None:
        """Raise ValueError unless `ranks`, in that order, is the group of `axis` that `rank`
        belongs to.
        """
        expected = self.group_of(rank, axis)
        if tuple(ranks) == expected:
            return
        elsewhere = [name for name in GROUP_AXES if tuple(ranks) == self.group_of(rank, name)]
        hint = f"; that is rank {rank}'s {elsewhere[0]} group" if elsewhere else ""
        raise ValueError(
            f"group {list(ranks)} is not the {axis} group of rank {rank} in grid {self}: "
            f"expected {list(expected)}{hint}"
        )

    def _lane(self, rank: int, axis: str) -> tuple[int, ...]:
        """The coordinates that all members of a group share."""
        at = self.coords(rank)
        return {
            "dp": (at.cp, at.tp),
            "cp": (at.dp, at.tp),
            "tp": (at.dp, at.cp),
            "grad": (at.tp,),
            "world": (),
        }[axis]

    def _check_axis(self, axis: str) -> None:
        if axis not in GROUP_AXES:
            raise ValueError(f"unknown axis {axis!r}: expected one of {', '.join(GROUP_AXES)}")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside grid {self}, which has {self.size} rank(s)")
