#!/bin/sh
# The comparison of all methods on a GPU machine, in the shapes of HybridGen's tables: about 20 minutes on an H200.
# Random weights whose scores spread as docs/comparison.md says; sink and recent window on the GPU, the rest in DRAM.
#
#   bench/compare_h200.sh REPORT SCRATCH       PYTHON=python3 unless set; SCRATCH: 20 GB for the peers' weights
#
# What the report holds already is not measured again, so a run that was cut short goes on.
set -u
report=$(realpath -m "$1") scratch=$(realpath -m "$2")
repo=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON-python3}
mkdir -p "$scratch/shapes"
"$python" "$repo/bench/peers/shapes.py" "$scratch/shapes" || exit
compare() {
  (cd "$scratch/shapes" && "$python" -m ambidex bench compare --report "$report" --load-format dummy --dtype bf16 \
    --budgets 1280 --num-sink-tokens 64 --recent-window 1024 --predict 32 --rounds 1 --steps 12 --cell-timeout 120 "$@")
}
"$python" "$repo/bench/peers/compare.py" --report "$report" --shape llama-3.1-8b --contexts 2048,16384 --steps 24 \
  --scratch "$scratch" --variants gpu-ambidex-exact,gpu-transformers-offloaded,gpu-transformers-dynamic
compare --models llama-3.1-8b,qwen2.5-7b --contexts 2K,4K,8K,16K,32K --batch 1
compare --models llama-3.2-1b,llama-3.2-3b,qwen2.5-1.5b,qwen2.5-14b --contexts 2K --batch 1
compare --models opt-1.3b,opt-2.7b,opt-6.7b,opt-13b --contexts 1920 --batch 1
compare --models opt-13b --contexts 1920 --batch 4,8,16 --policies exact,exact:stream_percent=100,bounded,hybridgen
