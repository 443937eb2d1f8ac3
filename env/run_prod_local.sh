#!/usr/bin/env bash
# One node: NPROC=2 bash env/run_prod_local.sh --batch-size 4 ... is `python -m rlkernel a2a-ffn`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -m rlkernel a2a-ffn --nproc "${NPROC:-8}" "$@"
