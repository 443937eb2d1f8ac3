"""The code as a ZIP that a stranger can unpack and run: equal trees give equal bytes.

Files are sorted and carry one fixed time; only what is listed here goes in, so no repository, no
virtual environment and no other experiment's results can slip along.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

WHOLE = ("rlkernel", "env", "tests/overlap")  # folders
NOTEBOOKS = ("notebooks/07_overlap.ipynb", "notebooks/08_cross_node.ipynb")
FILES = ("Makefile", "LICENSE", "CHANGELOG.md", "pyproject.toml", "requirements.txt")
FILES += ("tests/conftest.py", "tests/eight_ranks.py", "tests/records/traces.py")
FILES += ("tests/experiments/test_a2a_ffn.py", "tests/env/test_production_scripts.py", *NOTEBOOKS)
SUFFIXES = (".py", ".md", ".sh", ".sbatch", ".txt", ".css", ".j2", ".json")
SUMS = "SHA256SUMS"
TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a ZIP can say


def tree(root: Path) -> dict[str, bytes]:
    """Name -> content of the code that is handed in. Raises OSError for what cannot be read."""
    found = [path for name in WHOLE for path in (root / name).rglob("*") if path.suffix in SUFFIXES]
    found += [root / name for name in FILES if (root / name).is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(found)}


def sums(files: Mapping[str, bytes]) -> bytes:
    """What `sha256sum -c` reads."""
    each = sorted(files.items())
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in each).encode()


def packed(target: Path, files: Mapping[str, bytes]) -> None:
    """Write the ZIP, with the sums of everything in it. Scripts can be executed."""
    every = {**files, SUMS: sums(files)}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as book:
        for name in sorted(every):
            entry = zipfile.ZipInfo(name, TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.endswith(".sh") else 0o100644) << 16
            book.writestr(entry, every[name])
