"""What a notebook takes: its `parameters` cell read without running it, and values checked against
it.

papermill itself only warns about a name that the notebook does not have, and hands over text where
a number was meant. So a call is checked here first, by the rules of the experiments' own
parameters:

    nproc: tuple[int, ...] = (2, 4)   # tensor-parallel sizes          -p nproc '[2,4]'   -p nproc 4
    limit: int | None = None          # rows shown, all when None      -p limit none
"""

from __future__ import annotations

import ast
import difflib
import io
import json
import tokenize
from dataclasses import dataclass
from pathlib import Path

TAG = "parameters"
_NAMES = {"int": int, "float": float, "str": str, "bool": bool, "tuple": tuple, "list": list}


def _case():
    """The experiments' own rules, imported when they are needed: pages come before them."""
    from rlkernel.experiments import case

    return case


@dataclass(frozen=True)
class Parameter:
    """One assignment of the parameters cell: its type (an annotation, evaluated), default,
    remark.
    """

    name: str
    hint: object
    default: object
    help: str = ""

    def __str__(self) -> str:
        kind = f"{self.name} ({_case().describe(self.hint)}, default {self.default!r})"
        return f"{kind}  {self.help}".rstrip()


def read(notebook: str | Path) -> dict[str, Parameter]:
    """The parameters of a notebook in the order of their cell; {} where no cell has the tag.

    Raises UsageError for a file that is missing or no notebook, and for a parameters cell with
    anything in it but simple assignments of literals.
    """
    found: dict[str, Parameter] = {}
    for source in _tagged(Path(notebook)):
        remarks = _remarks(source)
        for node in ast.parse(source).body:
            parameter = _parameter(node, source, remarks)
            if parameter:
                found[parameter.name] = parameter
    return found


def validate(notebook: str | Path, given: dict[str, object]) -> dict[str, object]:
    """`given` (typed values or text) as typed values. Raises UsageError; launches nothing.

    An unknown name is answered with the nearest known one, a bad value with the parameter, its
    type, an example and what was given.
    """
    known = read(notebook)
    typed = {}
    for name, value in given.items():
        if name not in known:
            raise _case().UsageError(_unknown(name, known))
        typed[name] = _case().parse_value(name, known[name].hint, value)
    return typed


def pairs(words: list[list[str]] | None) -> dict[str, str]:
    """[["nproc", "[2,4]"], ...] as argparse collects -p -> {"nproc": "[2,4]"}; the last one
    counts.
    """
    return dict(words or ())


def _unknown(name: str, known: dict[str, Parameter]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"
    return f"unknown parameter {name}; {hint}"


def _tagged(notebook: Path) -> list[str]:
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except OSError as error:
        raise _case().UsageError(f"no such notebook: {notebook} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise _case().UsageError(f"{notebook} is not a notebook") from None
    tagged = [cell for cell in cells if TAG in cell.get("metadata", {}).get("tags", ())]
    return ["".join(cell["source"]) for cell in tagged]


def _parameter(node: ast.stmt, source: str, remarks: dict[int, str]) -> Parameter | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return None  # a docstring
    simple = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
    if not simple:
        text = ast.get_source_segment(source, node)
        raise _case().UsageError(
            f"a parameters cell holds `name: type = literal` only; found `{text}`"
        )
    try:
        hint = eval(ast.unparse(node.annotation), {"__builtins__": {}}, dict(_NAMES))
        default = ast.literal_eval(node.value)
    except (ValueError, NameError, TypeError):
        text = ast.get_source_segment(source, node)
        raise _case().UsageError(f"cannot read the parameter `{text}`") from None
    return Parameter(node.target.id, hint, default, remarks.get(node.end_lineno, ""))


def _remarks(source: str) -> dict[int, str]:
    """Line -> the comment at its end."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
