#!/bin/sh
# Weights beyond GPU memory, on a GPU machine, with the memory capped in software: about 15 minutes on an H200.
#
#   bench/qinfer_h200.sh OUT [PART ...]        PYTHON=python3 unless set; QUICK=1: tiny shapes on the CPU, to try it
#
# Records are appended in OUT, a line a command. Parts, in this order if none is named:
#
#   opt          OPT-30B bf16, 24 GiB: this engine, whole layers on CPU or GPU, streaming; batch 64, 8, 1   150 s
#   opt-rivals   the same by FlexGen's streaming, a batch and blocks of two; all on the CPU; all on the GPU, uncapped 180 s
#   sparsity     the same with an activation pattern: dense, screened rows, hot neurons; batch 64, 1        130 s
#   70b          Llama-2-70B Q4_0, 16 GiB: batch 16, 8, 1, and a prompt of 1,024 tokens                      90 s
#   predictions  step time and memory of configurations that nothing was fitted to                      60 + 150 s
#   grid         Qwen2.5-14B, 12 GB, batch 16, 8K each: the solver against a grid                           120 s
#   tuner        OPT-30B's layers, batch 1, 64, 1: weights that move against the best that stay              90 s
#   70b-16k      only if named: Llama-2-70B Q4_0 with 16K tokens each, batch 8, 1                            90 s
#
# The last three but one begin with a calibration (60 s), once for an OUT. A command that is cut by its time limit records
# what it has measured so far.
set -u
if [ $# -lt 1 ]; then
  sed -n '2,5p' "$0" >&2
  exit 2
fi
out=$(realpath -m "$1")
shift
repo=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON-python3}
quick=${QUICK-}
[ $# -gt 0 ] || set -- opt opt-rivals sparsity 70b predictions grid tuner
mkdir -p "$out"
export OMP_WAIT_POLICY=passive  # torch's threads share the cores with the CPU lane's
failed="$out/failed.txt"
rm -f "$failed"

# LIMIT COMMAND ...: in so many seconds; what fails is said, and the others run all the same.
run() {
  limit=$1
  shift
  timeout "$limit" "$@" || {
    echo "   ended with code $? (limit ${limit} s): $*" >&2
    echo "$*" >> "$failed"
  }
}

# LIMIT OPTION ...: of decode_weights.py.
weights() {
  limit=$1
  shift
  if [ -n "$quick" ]; then
    set -- "$@" --device cpu --dtype fp32 --gpu-memory 40MiB --steps 2 --context 24 --chunk 32 --batches 2,1
  fi
  run "$limit" "$python" "$repo/bench/decode_weights.py" --output "$out/decode_weights.jsonl" "$@" |
    grep -v '^      weights_gpu_memory\|^      mlp_sparsity: off'
}

calibrated() {
  [ -n "$quick" ] || [ -f "$out/profile.json" ] ||
    run 200 "$python" -m ambidex calibrate --profile "$out/profile.json" > "$out/calibrate.txt"
}

# LIMIT SCRIPT OPTION ...: of those that plan.
planned() {
  limit=$1 script=$2
  shift 2
  calibrated
  if [ -n "$quick" ]; then
    set -- --quick --steps 6
  else
    set -- --profile "$out/profile.json" "$@"
  fi
  run "$limit" "$python" "$repo/bench/$script.py" --output "$out/$script.jsonl" "$@"
}

shape() { [ -n "$quick" ] && echo "$2" || echo "$1"; }

for part in "$@"; do
  began=$(date +%s)
  echo "== $part"
  case $part in
    opt)
      weights 200 --shape "$(shape opt-30b tiny-opt)" --placement ours,layer_split,streamed --batches 64,8,1 --steps 4
      ;;
    opt-rivals)
      weights 240 --shape "$(shape opt-30b tiny-opt)" --placement flexgen,cpu,gpu --batches 64,8,1 --blocks 1,2 --steps 4
      ;;
    sparsity)
      weights 120 --shape "$(shape opt-30b tiny-opt)" --batches 1 --steps 16 \
        --sparsity off,relu-screened,relu-screened+dynamic
      weights 80 --shape "$(shape opt-30b tiny-opt)" --batches 64 --steps 4 --sparsity off,relu
      ;;
    70b)
      weights 120 --shape "$(shape llama-2-70b tiny)" --kind Q4_0 --gpu-memory 16GiB --batches 16,8,1 --steps 6 \
        --prefill "$(shape 1024 40)"
      ;;
    70b-16k)
      weights 150 --shape "$(shape llama-2-70b tiny)" --kind Q4_0 --gpu-memory 16GiB --batches 8,1 --steps 4 \
        --context 16384
      ;;
    predictions) planned 240 predictions --budget-s 150 --steps 6 ;;
    grid) planned 200 solver_grid --budget-s 110 --steps 5 ;;
    tuner) planned 150 tuner_run --layers 10 --gpu-memory 7GiB --steps 50 ;;
    *)
      echo "there is no part $part: see the head of $0" >&2
      exit 2
      ;;
  esac
  echo "   $part took $(($(date +%s) - began)) s"
done
[ ! -s "$failed" ]
