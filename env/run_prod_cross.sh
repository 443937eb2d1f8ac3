#!/usr/bin/env bash
# Several nodes: the same command on each, NODE_RANK aside, at about the same time.
#
#   NNODES=2 NPROC=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash env/run_prod_cross.sh --overlap kernel ...
#
# torchrun, no MPI. MASTER_ADDR is node 0's address as node 1 reaches it, MASTER_PORT 29500 if not
# said. NCCL_SOCKET_IFNAME, NCCL_IB_HCA and GLOO_SOCKET_IFNAME are passed on as they are. Nodes that
# differ in torch, Triton, NCCL or source end the run. Node 0 keeps the record and concludes.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export NNODES="${NNODES:-2}"
need() { [ -n "${!1:-}" ] || { echo "$1 is not set: $2" >&2; exit 2; }; export "${1?}"; }
need NODE_RANK "say which node this is, NODE_RANK=0 or 1"
need MASTER_ADDR "say where node 0 is, MASTER_ADDR=its IP address as the others reach it"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
exec "${PYTHON:-python}" -m rlkernel a2a-ffn --nproc "$((NNODES * ${NPROC:-8}))" "$@"
