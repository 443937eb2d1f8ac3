"""A door: the A2A-FFN's public checks, `python -m rlkernel preflight --what public`."""
import os
import sys

root, rest = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.getenv("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, rest]))
flags = ["-m", "rlkernel", "preflight", "--what", "public", "--target", "cuda", *sys.argv[1:]]
os.execv(sys.executable, [sys.executable, *flags])
