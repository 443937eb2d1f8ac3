#!/usr/bin/env bash
# What four or eight GPUs of one host can show, a record for each command:
#
#     bash env/run_many_gpus.sh 4               4 or 8
#     SHOW=1 bash env/run_many_gpus.sh 8        only print the commands
#     DEVICE=cpu bash env/run_many_gpus.sh 4    a rehearsal: the same, small, on CPU ranks over gloo
#
# A command that fails does not stop the next one; the exit code is that of the last that failed.
# What was measured already is not measured again. RLKERNEL_RESULTS: where run folders go.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gpus=${1:-}
case $gpus in
  4) layouts=tp4,tp2_cp2,tp2_cp2_sp ;;
  8) layouts=tp8,tp4_cp2,tp4_cp2_sp ;;
  *) echo "run_many_gpus.sh: '$gpus' GPUs: expected 4 or 8 as the only argument" >&2; exit 2 ;;
esac
device=${DEVICE:-cuda}
default=tree8.bf16/tokens:tree2.bf16
case $device in
  cuda)
    transports="nccl symmetric" rows="32 4096" repeats=100
    schedules=with-sm,sm-free,kernel matrix=full
    ffn="--device cuda --size qwen3 --peer-timeout 120" ws2="$ffn" wire="--device cuda"
    a2a="--device cuda --no-compile --peer-timeout 60"
    timed="--chunks 1,2,4,8 --warmup 10 --num-tests 41 --protocol documented,hot --trace"
    nodes="--chunks 4 --warmup 3 --num-tests 41 --trace" ;;
  cpu)
    transports=gloo rows=8 repeats=3
    schedules=with-sm,kernel matrix=small
    ffn="--device cpu --size small" ws2="$ffn --repeats 3"
    wire="--device cpu --transport gloo --message 16384 --calls 20 --samples 3"
    a2a="--device cpu --no-compile --batch-size 4 --tokens 16 --dim 128 --k 2"
    timed="--chunks 1,2 --warmup 1 --num-tests 3" nodes="--chunks 2 --num-tests 3" ;;
  *) echo "run_many_gpus.sh: DEVICE=$device: expected cuda or cpu" >&2; exit 2 ;;
esac
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
code=0

run() {
  echo "+ python -m rlkernel $*"
  [ "${SHOW:-0}" = 0 ] || return 0
  "$PYTHON" -m rlkernel "$@" && return 0
  code=$?
  echo "run_many_gpus.sh: exit code $code from: python -m rlkernel $*" >&2
}

# shellcheck disable=SC2086  # the words above are meant to fall apart
{
  for transport in $transports; do
    for m in $rows; do
      run det-ffn $ffn --what layer --layout "$layouts" --transport "$transport" --m "$m" \
        --contract "$default,tree8.bf16,tree8.fp32" --repeats $repeats
    done
    [ $device = cpu ] || run det-ffn $ffn --what time --layout "$layouts" --transport "$transport" \
      --m "${rows/ /,}" --contract "$default" --dx separate --dw auto --samples 12 --warmup 0.5
  done
  run wire $wire --nproc "$gpus"
  [ "$gpus" = 8 ] || run ws2 $ws2
  run a2a-ffn $a2a --nproc "$gpus" --overlap $schedules $timed
  run a2a-ffn $a2a --nproc "$gpus" --overlap $schedules $timed --backward
  if [ "$gpus" = 8 ]; then
    run a2a-ffn $a2a --nproc 8 --overlap $schedules $timed --comm-scale 2
    run a2a-ffn $a2a --nproc 8 --overlap $schedules $timed --compute-scale 2
    run a2a-ffn ${a2a%% --batch*} --nproc 8 --overlap $schedules --matrix $matrix --num-tests 0 \
      --check-correctness bitwise
  fi
  run a2a-ffn $a2a --nodes 2 --nproc "$gpus" --overlap with-sm,kernel $nodes
}
exit "$code"
