"""Interpreted kernels are chosen at import, so their tests run in processes of their own."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
