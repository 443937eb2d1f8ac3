"""One unit of work, and how its parameters are written down and read back. Imports no torch.

A case is (experiment, parameters, grid, dtype, seed, fault). Its key is a hash of exactly these, so
a case that was measured once is recognised wherever it is asked for again.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlkernel.grid import Grid

DTYPES = ("fp32", "bf16")
TARGETS = ("auto", "cpu", "cuda")  # auto: the GPUs where there is one for each rank, else the CPU


class UsageError(ValueError):
    """Something was asked for that cannot be done; exit code 2. Raised before anything is launched,
    or in a rank's run() by an experiment that sees only there what it was given.
    """


@dataclass(frozen=True)
class Case:
    """What is measured, nothing about where or when. `parameters` holds JSON scalars only."""

    experiment: str
    grid: Grid
    dtype: str = "fp32"
    seed: int = 0
    fault: str = "none"
    parameters: Mapping[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        return {
            "experiment": self.experiment,
            "grid": self.grid.to_dict(),
            "dtype": self.dtype,
            "seed": self.seed,
            "fault": self.fault,
            "parameters": dict(self.parameters),
        }

    @classmethod
    def from_dict(cls, d: Mapping) -> Case:
        return cls(**{**d, "grid": Grid(**d["grid"])})

    @property
    def key(self) -> str:
        """16 hex digits of the SHA-256 of the canonical JSON."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """`tp2 fp32 seed 11 fault none`, with the other parameters behind."""
        rest = "".join(f" {name}={value}" for name, value in self.parameters.items())
        return f"{self.grid} {self.dtype} seed {self.seed} fault {self.fault}{rest}"


def param(default, help: str, *, unit: str = "", choices: Sequence = ()):
    """A field of a Params class: its default, what it means, its unit and the values it may
    take.
    """
    return field(default=default, metadata={"help": help, "unit": unit, "choices": tuple(choices)})


def parse_params(cls: type, values: Mapping[str, object]):
    """Build `cls` from typed values or text (a command line, papermill, YAML), read by the
    annotations.

    Raises UsageError for an unknown name (with the nearest known one), a value that does not parse
    (with the parameter, its type, an example and what was given) and a value outside the choices.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    parsed = {}
    for name, value in values.items():
        if name not in fields:
            raise UsageError(unknown("parameter", name, fields))
        parsed[name] = parse_value(name, hints[name], value)
        check_choices(name, parsed[name], fields[name].metadata.get("choices", ()))
    return cls(**parsed)


def bare_flags(cls: type, words: Sequence[str]) -> list[str]:
    """A command line in which `--backward` is `--backward true` and `--no-compile` is
    `--compile false`, for the fields of `cls` that are bool.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls) if hints[f.name] is bool]
    flags = {f"--{name.replace('_', '-')}" for name in names}
    read = []
    for word, behind in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--no-") and f"--{word[5:]}" in flags:
            read += [f"--{word[5:]}", "false"]
        else:
            read += [word, "true"] if word in flags and behind.startswith("-") else [word]
    return read


def unknown(what: str, name: str, known: Sequence[str] | Mapping) -> str:
    """`unknown parameter wrold_size; did you mean world_size?`"""
    close = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
    return f"unknown {what} {name}{hint}"


def check_choices(name: str, value: object, choices: Sequence) -> None:
    for one in value if isinstance(value, tuple) else (value,):
        if choices and one not in choices:
            close = difflib.get_close_matches(str(one), [str(c) for c in choices], 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UsageError(
                f"{name}={one!r} is not possible{hint}: "
                f"expected one of {', '.join(map(str, choices))}"
            )


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise UsageError for a seed that a random generator does not take."""
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise UsageError(f"seed={seed} is not possible: expected a number from 0 to 2^32 - 1")


def parse_value(name: str, hint: object, value: object) -> object:
    """Read one value by its annotation: int, float, str, bool, tuple[T, ...], list[T], T | None."""
    try:
        return _read(hint, value)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(
            f"parameter {name}: expected {describe(hint)}, for example {example(hint)}; "
            f"got {value!r}"
        ) from None


def describe(hint: object) -> str:
    """An annotation in a reader's words: `int`, `tuple of int`, `int or None`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, list):
        return f"{origin.__name__} of {describe(args[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join("None" if a is type(None) else describe(a) for a in args)
    return getattr(hint, "__name__", str(hint))


def example(hint: object) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, list):
        return f"[{example(args[0])}, {example(args[0])}]"
    if origin in (typing.Union, types.UnionType):
        return example(args[0])
    return {int: "4", float: "1e-3", bool: "true", str: "text"}.get(hint, "text")


def _read(hint: object, value: object) -> object:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None or (
            isinstance(value, str) and value.strip().lower() in ("none", "null", "")
        ):
            return None
        return _read(next(a for a in args if a is not type(None)), value)
    if origin in (tuple, list):
        items = (
            _items(value)
            if isinstance(value, str)
            else value
            if isinstance(value, list | tuple)
            else [value]
        )
        read = origin(_read(args[0], item) for item in items)
        if not read:
            raise ValueError("an empty list asks for nothing")
        return read
    if hint is bool:
        return _read_bool(value)
    if hint is str:
        if not isinstance(value, str):
            raise ValueError
        return value
    if isinstance(value, bool) or value is None:
        raise ValueError
    if hint is int and isinstance(value, float) and value != int(value):
        raise ValueError
    return hint(value.strip() if isinstance(value, str) else value)


def _read_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {
        "true": True,
        "on": True,
        "yes": True,
        "1": True,
        "false": False,
        "off": False,
        "no": False,
        "0": False,
    }
    if isinstance(value, str | int) and str(value).strip().lower() in words:
        return words[str(value).strip().lower()]
    raise ValueError


def _items(text: str) -> list:
    """`[4, 16]`, `4,16` or `4` -> the items, still unread."""
    text = text.strip()
    if text[:1] in "[(" and text[-1:] in "])":
        text = text[1:-1]
    return [part.strip().strip("'\"") for part in text.split(",") if part.strip()]
