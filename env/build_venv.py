"""Build .venv from the pinned requirements, or leave it alone if it is still exactly that.

    python3 env/build_venv.py [--target cpu|cuda|rocm] [--show]

Every target of the Makefile calls this first, so it must be quick (about 0.1 s) when there is
nothing to do. A .venv is ready when all of this holds:

  - its stamp carries the hash of the requirement files and of this file, for the same target;
  - it stands where it was built (scripts inside a venv carry absolute paths);
  - its interpreter starts, with the Python version that the stamp names;
  - every package that the requirement files pin is there, at that version.

Anything else (a first run, an edited pin, an installation that broke off, a package removed by
hand) and .venv is built anew from nothing; pip's cache makes that cheap. The stamp is written last.

Standard library only. The lines above the version check must be readable by any Python 3.
"""

import sys

OLDEST, NEWEST = (3, 10), (3, 13)
if not OLDEST <= sys.version_info[:2] <= NEWEST:
    sys.exit(
        "rlkernel is pinned for Python %d.%d to %d.%d and this python3 is %d.%d; choose another, "
        "for example: make setup PYTHON=python3.12" % (OLDEST + NEWEST + sys.version_info[:2])
    )

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("cpu", "cuda", "rocm")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)\s*(?:;\s*(.+))?$")
# The build of torch that a target needs. A CUDA or ROCm build computes on a CPU too: only larger.
BUILD = {"cpu": "True", "cuda": "torch.version.cuda", "rocm": "torch.version.hip"}


def detect() -> str:
    """What this machine has: a GPU that its vendor's tool lists, else "cpu"."""
    for tool, option, sign, target in (
        ("nvidia-smi", "-L", "GPU ", "cuda"),
        ("rocm-smi", "--showid", "GPU[", "rocm"),
    ):
        if shutil.which(tool):
            try:
                listed = subprocess.run([tool, option], capture_output=True, text=True, timeout=30)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if listed.returncode == 0 and sign in listed.stdout:
                return target
    return "cpu"


def files(root: Path, target: str) -> "list[Path]":
    """The requirement files of a target: its own and all that it includes, in reading order."""
    found = []

    def follow(path):
        found.append(path)
        for line in path.read_text(encoding="utf-8").splitlines():
            word, _, name = line.partition(" ")
            if word in ("-r", "-c"):
                follow((path.parent / name.strip()).resolve())

    follow(root / "env" / f"requirements-{target}.txt")
    return found


def fingerprint(root: Path, target: str) -> str:
    """16 hex digits that change when a pin, the target or the way to build changes."""
    text = hashlib.sha256(target.encode())
    for path in [*files(root, target), Path(__file__)]:
        text.update(path.read_bytes())
    return text.hexdigest()[:16]


def applies(marker: str) -> bool:
    """The two kinds of marker that the requirement files use, and no others."""
    form = r"""(python_version|platform_system)\s*(<|>=|==)\s*["']([\w.]+)["']"""
    named = re.fullmatch(form, marker)
    if named is None:
        raise SystemExit(f"requirements: the marker {marker!r} is none that build_venv.py reads")
    name, sign, value = named.groups()
    if name == "platform_system":
        return {"linux": "Linux", "darwin": "Darwin"}.get(sys.platform, sys.platform) == value
    asked = tuple(int(part) for part in value.split("."))
    here = sys.version_info[:2]
    return {"<": here < asked, ">=": here >= asked, "==": here == asked}[sign]


def pins(root: Path, target: str) -> "dict[str, str]":
    """name -> version of the direct dependencies that apply to this interpreter and platform."""
    wanted = {}
    for path in files(root, target):
        if path.name == "constraints.txt":
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            match = PIN.match(line.strip())
            if match and (match[3] is None or applies(match[3])):
                wanted[canonical(match[1])] = match[2]
    return wanted


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def fault(venv: Path, target: str, root: Path = ROOT) -> "str | None":
    """Why this venv has to be built anew, or None if it is ready."""
    try:
        stamp = json.loads((venv / "ready.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it was never finished" if venv.exists() else "there is none yet"
    except (OSError, ValueError):
        return "its stamp is unreadable"
    if stamp.get("target") != target:
        return f"it was built for {stamp.get('target')}, not for {target}"
    if stamp.get("fingerprint") != fingerprint(root, target):
        return "the requirements have changed"
    if stamp.get("root") != str(root):
        return "the tree has moved"
    here = "%d.%d" % sys.version_info[:2]
    if stamp.get("python") != here:
        return f"it was built with Python {stamp.get('python')}, not {here}"
    try:
        subprocess.run([str(venv / "bin" / "python"), "-c", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "its interpreter does not start"
    packages = venv / "lib" / f"python{here}" / "site-packages"
    have = {
        canonical(found.metadata["Name"] or ""): found.version.partition("+")[0]
        for found in importlib.metadata.distributions(path=[str(packages)])
    }
    wrong = [name for name, version in pins(root, target).items() if have.get(name) != version]
    return f"missing or at another version: {', '.join(wrong)}" if wrong else None


def build(venv: Path, target: str, root: Path = ROOT) -> None:
    """From nothing to ready. Leaves a venv without a stamp if a step fails (SystemExit)."""
    # An activated .venv must not delete itself from within: go back to the interpreter under it.
    base = getattr(sys, "_base_executable", None) or sys.executable
    python = str(venv / "bin" / "python")
    step([base, "-m", "venv", "--clear", str(venv)], "python3 has no venv module; on Debian and "
         "Ubuntu it is the package python3-venv")
    wish = ["-r", str(root / "env" / f"requirements-{target}.txt")]
    step([python, "-m", "pip", "install", "-qq", "--no-input", "--progress-bar", "off",
          "--disable-pip-version-check", *wish], "pip could not install the pinned requirements; "
         "where it looks is pip's own setting (env/README.md)")
    # One line makes `import rlkernel` work from any folder; no build step, so nothing to download.
    site = venv / "lib" / ("python%d.%d" % sys.version_info[:2]) / "site-packages"
    (site / "rlkernel.pth").write_text(f"{root}\n", encoding="utf-8")
    probe = f"import torch, rlkernel, sys; sys.exit(0 if {BUILD[target]} else 1)"
    step([python, "-c", probe], f"torch is installed but is no {target} build: point pip to one "
         "(env/README.md) or choose TARGET=cpu")
    ready = {"fingerprint": fingerprint(root, target), "target": target, "root": str(root),
             "python": "%d.%d" % sys.version_info[:2]}
    fresh = venv / "ready.json.new"
    fresh.write_text(json.dumps(ready), encoding="utf-8")
    fresh.replace(venv / "ready.json")


def step(command: "list[str]", otherwise: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, cwd=ROOT, pass_fds=LOCK)
    if done.returncode:
        raise SystemExit(f"setup failed: {otherwise}")


LOCK = []  # the descriptor that holds the lock, for the steps to inherit


@contextlib.contextmanager
def alone():
    """Two `make` at a time in one tree: the second waits, then finds the venv ready.

    The steps inherit the lock, so a pip that outlives a killed `make` is waited for as well.
    """
    import fcntl

    with open(__file__, encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("another set-up of this tree is at work, waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        LOCK[:] = [handle.fileno()]
        yield


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="", help=f"{', '.join(TARGETS)}; default: what .venv "
                        "was last built for, else what the machine has")
    parser.add_argument("--show", action="store_true", help="say what would be done, do nothing")
    asked = parser.parse_args(argv)
    if asked.target not in ("", *TARGETS):
        parser.error(f"TARGET={asked.target} is none of {', '.join(TARGETS)}")
    venv = ROOT / ".venv"
    with alone():
        target = asked.target or last_target(venv) or detect()
        reason = fault(venv, target)
        if reason is None:
            if asked.show:
                print(f".venv is ready for {target}")
            return 0
        print(f"building .venv for {target} with {os.path.basename(sys.executable)} "
              f"{sys.version.split()[0]}: {reason}", flush=True)
        if not asked.show:
            build(venv, target)
            print(".venv is ready", flush=True)
    return 0


def last_target(venv: Path) -> str:
    """So that `make setup TARGET=cuda` is said once and not with every later command."""
    try:
        target = json.loads((venv / "ready.json").read_text(encoding="utf-8")).get("target", "")
    except (OSError, ValueError):
        return ""
    return target if target in TARGETS else ""


if __name__ == "__main__":
    sys.exit(main())
