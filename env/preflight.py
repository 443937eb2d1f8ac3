"""A door: `python env/preflight.py ...` is `python -m rlkernel preflight ...`, from any folder."""
import os
import sys

root, rest = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getenv("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, rest]))
os.execv(sys.executable, [sys.executable, "-m", "rlkernel", "preflight", *sys.argv[1:]])
