"""Takes out of a text what would tell whose machine it was written on."""

from __future__ import annotations

import re
import socket
import sys
import sysconfig
import tempfile
from pathlib import Path

import rlkernel

REPOSITORY = Path(rlkernel.__file__).resolve().parents[1]

# What is left of an absolute path after the known folders are gone: its last part says enough. A
# path starts behind a space, a quote, a bracket or an equals sign, never behind a word ("a/b/c").
_PART = r"[^\s/'\"`,;:()\[\]{}<>|]"
_PATH = re.compile(rf"(?<![\w.~>/:-])/(?:{_PART}+/)+(?={_PART}|\b)")
_HOME = re.compile(r"(?:[A-Za-z]:)?[\\/](?:home|Users|root)(?=[\\/\s'\"]|$)(?:[\\/][^\\/\s'\"]+)?")


def scrub(text: str) -> str:
    """`text` with paths made relative or cut to their last part, and this host's name removed.

    >>> scrub('File "/somewhere/else/torch/nn.py", line 3')
    'File ".../nn.py", line 3'
    """
    for folder, name in _known_folders():
        text = text.replace(folder + "/", name)
        text = re.sub(re.escape(folder) + r"(?![\w/.-])", name.rstrip("/") or ".", text)
    text = _HOME.sub("~", text)
    text = _PATH.sub(".../", text)
    host = socket.gethostname()
    # A short name may be a word like "gpu": that one counts in an address only.
    behind = r"(?![\w-])" if len(host) > 6 else r"(?=:\d|\.\w)"
    return re.sub(rf"(?<![\w-]){re.escape(host)}{behind}", "<host>", text)


def scrub_all(obj: object) -> object:
    """`scrub` on every string of a JSON-like value, keys included."""
    if isinstance(obj, str):
        return scrub(obj)
    if isinstance(obj, dict):
        return {scrub(str(name)): scrub_all(value) for name, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [scrub_all(value) for value in obj]
    return obj


def _known_folders() -> list[tuple[str, str]]:
    """Longest first, so that a virtual environment inside the repository is not cut in two."""
    folders = {
        str(REPOSITORY): "",
        sysconfig.get_paths()["purelib"]: "<packages>/",
        sysconfig.get_paths()["stdlib"]: "<python>/",
        sys.prefix: "<python>/",
        sys.base_prefix: "<python>/",
        tempfile.gettempdir(): "<tmp>/",
        str(Path.home()): "~/",
    }
    folders.pop("/", None)  # a home or a prefix of "/" would turn every path into itself
    return sorted(folders.items(), key=lambda pair: -len(pair[0]))
