#!/usr/bin/env bash
# Two nodes on one machine, by hand: what `python -m rlkernel ws2` does by itself there, typed out.
#
#     env/two_nodes.sh [flags of ws2, for example --device cuda --size qwen3]
#
# Two processes run the same command as on two machines. With GPUs each tells NCCL that it is
# another host, so bytes between them take the network path; two ranks may then share a GPU, which
# is good for bits and never for times. This is an emulation, and the record calls it that.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export NNODES=2 MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

NODE_RANK=1 NCCL_HOSTID=node1 "$PYTHON" -m rlkernel ws2 "$@" >/dev/null &
other=$!
trap 'kill "$other" 2>/dev/null || true' EXIT
code=0
NODE_RANK=0 NCCL_HOSTID=node0 "$PYTHON" -m rlkernel ws2 "$@" || code=$?
theirs=0
wait "$other" || theirs=$?
trap - EXIT
[ "$code" != 0 ] || code=$theirs
exit "$code"
