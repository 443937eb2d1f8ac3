"""The rules of the house as functions: each takes the root of a tree, returns what breaks a rule.

tests/test_house.py holds them over this tree (nothing may come back) and over a deliberately bad
one (something must). Imports are read from the syntax tree, so nothing is executed here.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST_FILE = 350  # lines; a longer one wants to be two
MOST_CELLS = 25
LONGEST_FUNCTION = 10  # lines, of a function inside a notebook

# One direction: a unit may use its own modules, records, and everything on a lower rung.
LADDER = (
    ("grid", "contract", "compare"),
    ("kernels",),
    ("collectives",),
    ("ffn", "overlap", "reconstruct"),
    ("audit", "plugin"),
    ("experiments",),
    ("run",),
    ("__main__",),
)
# Units that share a rung are strangers, except those of the lowest: nothing lies below them.
NEIGHBOURS = {("contract", "grid"), ("compare", "contract"), ("compare", "grid")}
BESIDE = {"records": {"records"}, "figures": {"figures", "records"}}
BESIDE["pages"] = {"pages", "figures", "records"}
# The doors that open only inside a function: who -> whom. Nothing else may reach across.
LAZY = {
    ("pages", "rlkernel.experiments"),  # what parameters does a notebook's experiment take?
    ("pages", "rlkernel.run.launch"),  # measure what a notebook is about to show
    ("__main__", "rlkernel.pages"),  # report, notebook, sweep, readme
    ("ffn", "rlkernel.run.timing"),  # the protocol of everything that is timed
    ("ffn", "rlkernel.run.aligned"),  # and of what several ranks do together
    ("experiments", "rlkernel.run.timing"),
    ("experiments", "rlkernel.run.aligned"),
    ("overlap", "rlkernel.run.timing"),
}
# Who may import what from outside the standard library. What is not here is no dependency.
NUMERIC = {"contract", "compare", "kernels", "collectives", "ffn", "overlap", "reconstruct"}
NUMERIC |= {"audit", "plugin", "experiments", "run"}
FOREIGN = {"torch": NUMERIC, "triton": {"kernels", "overlap"}, "matplotlib": {"figures"}}
FOREIGN["numpy"] = NUMERIC | {"figures"}
FOREIGN["PIL"] = {"figures"}  # comes with matplotlib, which writes its PNG by it
FOREIGN["transformers"] = {"ffn"}
FOREIGN["cuda"] = {"collectives", "overlap"}  # cuda-bindings: copies between peers, a driver begun
FOREIGN["cupti"] = FOREIGN["nvidia"] = {"overlap"}  # cupti-python, CUPTI: hardware counters
FOREIGN |= {
    name: {"pages"}
    for name in ("IPython", "ipykernel", "ipywidgets", "jupyter_client", "jupyter_core", "nbclient")
    + ("nbconvert", "nbformat", "nbstripout", "papermill", "traitlets", "yaml", "jinja2")
}
# Import any of these and torch must not come along: they answer --help, draw and render.
TORCH_FREE = ("__main__", "grid", "experiments", "records", "figures", "pages", "run.launch")


@dataclass(frozen=True)
class Import:
    """`who` (a module of ours) imports `whom`; `lazy`: inside a function, or for types only."""

    who: str
    whom: str
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"{self.who}:{self.line} imports {self.whom}"


def unit(module: str) -> str:
    """rlkernel.run.launch -> run; rlkernel itself -> ''."""
    return (module.split(".") + [""])[1]


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    found = {}
    for path in sorted((root / "rlkernel").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> list[Import]:
    """Every import statement and every import_module("...") of the package."""
    known = modules(root)
    found = []
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node, lazy in _statements(ast.parse(path.read_text(encoding="utf-8")), False):
            for whom in _targets(node, package, known):
                found.append(Import(name, whom, node.lineno, lazy))
    return found


def _statements(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            inside = True
        if isinstance(child, (ast.Import, ast.ImportFrom, ast.Call)):
            yield child, inside
        yield from _statements(child, inside)


def _targets(node: ast.AST, package: str, known: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        inner = [f"{base}.{alias.name}" for alias in node.names]
        if base == "rlkernel":  # `from rlkernel import grid`; __version__ is no module
            return [base if "__" in name else name for name in inner]
        ours = [name for name in inner if name in known]
        return ours + ([base] if len(ours) < len(inner) else [])
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if called in ("import_module", "__import__") and node.args:
        first = node.args[0]
        if isinstance(first, ast.JoinedStr) and first.values:
            first = first.values[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value.rstrip(".")]
    return []


def against_the_direction(root: Path) -> list[str]:
    """Imports that reach up, sideways, or out to a package that is not this unit's business."""
    wrong = []
    for found in imports(root):
        who, top = unit(found.who), found.whom.split(".")[0]
        if top == "rlkernel":
            if not _allowed(who, found):
                wrong.append(f"{found}, against the one direction")
        elif top not in sys.stdlib_module_names and who not in FOREIGN.get(top, ()):
            wrong.append(f"{found}, which is not for {who or 'the package itself'}")
    return wrong


def _allowed(who: str, found: Import) -> bool:
    whom = unit(found.whom)
    if whom == "" or whom == who:
        return True
    if any(who == door and f"{found.whom}.".startswith(f"{to}.") for door, to in LAZY):
        return found.lazy
    if who in BESIDE:
        return whom in BESIDE[who]
    if whom == "records":
        return who != ""
    rung = {name: height for height, level in enumerate(LADDER) for name in level}
    if who not in rung or whom not in rung:
        return False
    return rung[whom] < rung[who] or (who, whom) in NEIGHBOURS


def torch_at_import(root: Path) -> list[str]:
    """Torch-free modules whose import, followed through ours, executes `import torch`."""
    known, graph = modules(root), _executed(root)
    wrong = []
    for start in known:
        if not any(f"{start}.".startswith(f"rlkernel.{free}.") for free in TORCH_FREE):
            continue
        seen, todo = {start: (start,)}, [start]
        while todo:
            here = todo.pop()
            for whom in graph.get(here, ()):
                if whom.split(".")[0] in ("torch", "triton"):
                    wrong.append(" -> ".join((*seen[here], whom)))
                elif whom in known and whom not in seen:
                    seen[whom] = (*seen[here], whom)
                    todo.append(whom)
    return wrong


def cycles(root: Path) -> list[str]:
    """Modules that import each other in a ring while they are being imported."""
    graph, done, wrong = _executed(root, parents=False), set(), []

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            wrong.append(" -> ".join((*trail[trail.index(name) :], name)))
        elif name not in done:
            for whom in graph.get(name, ()):
                visit(whom, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    return wrong


def _executed(root: Path, parents: bool = True) -> dict[str, set[str]]:
    """module -> what its import executes: import statements, and (parents) packages above them."""
    graph: dict[str, set[str]] = {name: set() for name in modules(root)}
    for found in imports(root):
        if not found.lazy:
            graph[found.who].add(found.whom)
            parts = found.whom.split(".")
            if parents and parts[0] == "rlkernel":
                graph[found.who] |= {".".join(parts[:n]) for n in range(1, len(parts))}
    return graph


def long_files(root: Path) -> list[str]:
    """Python files of more than LONGEST_FILE lines."""
    found = []
    for folder in ("rlkernel", "tests", "env", "notebooks"):
        for path in sorted((root / folder).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > LONGEST_FILE:
                found.append(f"{path.relative_to(root)}: {lines} lines")
    return found


def untidy_notebooks(root: Path) -> list[str]:
    """Outputs, counts, too many cells, logic: whatever a committed notebook must not carry."""
    wrong = []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        if len(cells) > MOST_CELLS:
            wrong.append(f"{path.name}: {len(cells)} cells")
        for number, cell in enumerate(cells):
            if cell["cell_type"] != "code":
                continue
            if cell.get("outputs") or cell.get("execution_count") is not None:
                wrong.append(f"{path.name}, cell {number}: not stripped (nbstripout does it)")
            for length, name in _functions("".join(cell["source"])):
                if length > LONGEST_FUNCTION:
                    wrong.append(f"{path.name}, cell {number}: {name} has {length} lines")
    return wrong


def _functions(source: str) -> list[tuple[int, str]]:
    plain = re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)
    return [
        (node.end_lineno - node.lineno + 1, getattr(node, "name", "a lambda"))
        for node in ast.walk(ast.parse(plain))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))
    ]


PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([\w.]+)( *; *[\w ]+(<|>=|==) *\"[\w.]+\")?$")


def pins(path: Path) -> tuple[list[str], list[str]]:
    """(lines that pin exactly, lines that do neither that nor include another file)."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", "-r ", "-c "))]
    return [li for li in lines if PIN.match(li)], [li for li in lines if not PIN.match(li)]


def loose_requirements(root: Path) -> list[str]:
    """Whatever is not pinned exactly, pinned twice, or differs between the platforms' files."""
    env, main = root / "env", root / "requirements.txt"
    wrong, exact = [], {}
    for path in (main, *sorted(env.glob("requirements-*.txt")), env / "constraints.txt"):
        exact[path.name], loose = pins(path)
        wrong += [f"{path.name}: {line!r} is no exact pin" for line in loose]
    for name in ("cpu", "cuda"):
        text = (env / f"requirements-{name}.txt").read_text(encoding="utf-8")
        if "-r ../requirements.txt" not in text.splitlines():
            wrong.append(f"requirements-{name}.txt does not include requirements.txt")
    without_triton = {line for line in exact[main.name] if not line.startswith("triton==")}
    for line in sorted(without_triton ^ set(exact["requirements-rocm.txt"])):
        wrong.append(f"requirements-rocm.txt and requirements.txt differ in {line!r}")
    direct = {canonical(line) for line in exact[main.name]}
    twice = direct & {canonical(line) for line in exact["constraints.txt"]}
    return wrong + [f"{name} is pinned as a requirement and as a constraint" for name in twice]


def canonical(line: str) -> str:
    """Typing_Extensions==4.16.0 -> typing-extensions, the way pip compares names."""
    return re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()


def undocumented_targets(root: Path) -> list[str]:
    """Makefile targets that `make help` would not show, and pages that name one not there."""
    text = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", text, flags=re.MULTILINE))
    described = set(re.findall(r"^([a-z]+):[^#\n]*## \S", text, flags=re.MULTILINE))
    phony = set((re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE) or [""])[0].split())
    wrong = [f"{name} has no `## description`" for name in sorted(targets - described)]
    wrong += [f"{name} is not in .PHONY" for name in sorted(targets - phony)]
    for page in ("README.md", "env/README.md", "results/README.md"):
        named = set(re.findall(r"\bmake ([a-z]+)\b", _code(root / page)))
        wrong += [f"{page} names `make {name}`" for name in sorted(named - targets)]
    for name in ("report", "test"):
        if not re.search(rf"\bmake {name}\b", _code(root / "README.md")):
            wrong.append(f"README.md does not say `make {name}`")
    return wrong


def _code(page: Path) -> str:
    """What stands in backticks, in a fenced block or in an indented one."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"```.*?```|`[^`\n]+`|^ {4}[^\n]+", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(found)
