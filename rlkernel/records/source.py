"""Which code measured it: a hash over the import closure of an experiment.

Follows every import inside the package, those within functions as well, and hashes what the
compiler sees: comments, docstrings and layout do not count. Nothing is imported for it. The hash is
the same in every Python that the package runs on, and needs no git.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from pathlib import Path

from rlkernel.records.scrub import REPOSITORY

PACKAGE = "rlkernel"
_DOTTED = re.compile(rf"{PACKAGE}(\.[A-Za-z_]\w*)+")


def source_hash(module_name: str, root: Path | None = None) -> str:
    """64 hex digits over `module_name` and all of the package that it can reach.

    root: the folder that holds the package (default: the one this file was loaded from). Raises
    ValueError for a module that is not found.
    """
    whole = hashlib.sha256()
    for name, tree in sorted(closure(module_name, root).items()):
        whole.update(f"{name}\n{_dump(tree)}\n".encode())
    return whole.hexdigest()


def closure(module_name: str, root: Path | None = None) -> dict[str, ast.Module]:
    """Module name -> syntax tree for everything that counts, package __init__ files included."""
    root = Path(root or REPOSITORY)
    trees: dict[str, ast.Module] = {}
    queue = _with_parents(module_name)
    while queue:
        name = queue.pop()
        if name in trees:
            continue
        path = _file_of(name, root)
        if path is None:
            if name == module_name:
                raise ValueError(f"no module {module_name!r} to hash")
            continue  # a name inside a module, or not one of ours
        trees[name] = ast.parse(path.read_bytes())
        is_package = path.name == "__init__.py"
        for wanted in _imports(trees[name], name, is_package):
            if wanted.partition(".")[0] == PACKAGE:
                queue += _with_parents(wanted)
    return trees


def _with_parents(name: str) -> list[str]:
    """rlkernel.a.b -> [rlkernel, rlkernel.a, rlkernel.a.b]; a module of somebody else's: itself."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return [name]
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _file_of(name: str, root: Path) -> Path | None:
    if name.partition(".")[0] != PACKAGE:
        loaded = sys.modules.get(name)
        found = getattr(loaded, "__file__", None)
        if found is None:
            spec = importlib.util.find_spec(name)
            found = spec.origin if spec else None
        return Path(found) if found else None
    base = root.joinpath(*name.split("."))
    # By path, not by the import system: finding a submodule imports its package, torch and all.
    candidates = (base / "__init__.py", base.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None)


def _imports(tree: ast.Module, name: str, is_package: bool) -> set[str]:
    """Names that may be modules: of import statements at any depth, and of "rlkernel.x" strings."""
    found: set[str] = set()
    for node in ast.walk(_without_docstrings(tree)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, name, is_package)
            # `from a import b`: b is a module or a name in a; the file system knows.
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _DOTTED.fullmatch(node.value):
                found.add(node.value)
    return found


def _base(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    up = node.level - 1 if is_package else node.level
    parts = parts[: len(parts) - up]
    return ".".join([*parts, node.module] if node.module else parts)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """Takes them out of `tree` itself, which is then returned."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return tree


def _dump(node: object) -> str:
    """Like ast.dump, but empty fields are left out: Pythons differ in which of those exist."""
    if isinstance(node, ast.JoinedStr):
        return f"(JoinedStr {_dump(_joined(node.values))})"
    if isinstance(node, ast.AST):
        fields = [(name, getattr(node, name, None)) for name in node._fields if name != "kind"]
        kept = [
            f"{name}={_dump(value)}" for name, value in fields if value is not None and value != []
        ]
        constant = isinstance(node, ast.Constant) and node.value is None
        return f"({type(node).__name__} {' '.join(kept)}{'None' if constant else ''})"
    if isinstance(node, list):
        return "[" + ",".join(map(_dump, node)) + "]"
    return repr(node)


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string with neighbouring texts merged: Pythons cut them differently."""
    merged: list[ast.expr] = []
    for value in values:
        text = isinstance(value, ast.Constant)
        if text and merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(f"{merged[-1].value}{value.value}")
        elif not text or value.value != "":
            merged.append(value)
    return merged
