#!/bin/sh
# The comparison of all methods on a GPU machine, in the shapes of HybridGen's tables, what matters most first: some
# twenty-five minutes on an H200 by estimate. Random weights whose scores spread as
# docs/comparison.md says; sink and recent window on the GPU, the rest in DRAM.
#
#   bench/compare_h200.sh REPORT SCRATCH [SECONDS]
#
# SCRATCH: 20 GB for the peers' weights. PYTHON: one that imports ambidex and transformers; python3 unless set. After
# SECONDS it ends, with a report of what is there. What the report holds already is not measured again, so a run that was
# cut short goes on.
set -u
report=$(realpath -m "$1") scratch=$(realpath -m "$2")
end=$(($(date +%s) + ${3-86400}))
repo=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON-python3}
shapes=$scratch/shapes
mkdir -p "$shapes"
"$python" "$repo/bench/peers/shapes.py" "$shapes" || exit
(cd "$shapes" && "$python" -c 'import ambidex.compare.worker, transformers') || {
  echo "PYTHON=$python cannot import ambidex and transformers from $shapes: install them, or give an absolute PYTHONPATH" >&2
  exit 2
}

stage() { # NAME COMMAND…: run it in what is left of the time
  left=$((end - $(date +%s)))
  if [ "$left" -lt 20 ]; then
    echo "no time is left for: $1" >&2
    return
  fi
  echo "== $(date -u +%H:%M:%S) $1" >&2
  shift
  timeout --foreground -s TERM -k 60 "$left" "$@"
}
# One request at a time and no longer contexts than are measured: what DRAM and GPU hold for others takes seconds to pin.
compare() { # NAME MAX_CONTEXT_LEN FLAG…
  name=$1 longest=$2
  shift 2
  (cd "$shapes" && stage "$name" "$python" -m ambidex bench compare --report "$report" --load-format dummy --dtype bf16 \
    --num-sink-tokens 64 --recent-window 1024 --max-context-len "$longest" --max-tokens-per-step 2048 \
    --predict 32 --rounds 1 --steps 20 --cell-timeout 120 "$@")
}
turns() { # SHAPE POINTS: those that read all KV, and bounded
  stage "turns, $1" "$python" "$repo/bench/decode_turns.py" --shape "$1" --points "$2" --score-spread 4.5 \
    --policies exact,flexgen,moe_lightning,bounded --output "$report/turns.jsonl" > /dev/null
}
one="--batch 1 --budgets 1280 --max-running-requests 1"
many="--budgets 20480 --max-running-requests 16"
full=exact,flexgen,moe_lightning,bounded,hybridgen
chosen=exact,bounded,hybridgen # what exact answers counts for flexgen and moe_lightning, which attend all keys, too
rows=streaming_llm,quest,infinigen
sums=h2o,qinfer_windows,keyformer
small=llama-3.2-1b,llama-3.2-3b,qwen2.5-1.5b,qwen2.5-14b
opt=opt-1.3b,opt-2.7b,opt-6.7b,opt-13b
all=2K,4K,8K,16K,32K

# shellcheck disable=SC2086  # $one and $many are several words
{
  compare "lengths, speed" 33024 $one --only speed --models llama-3.1-8b --contexts $all --policies $full
  compare "batches" 2048 $many --dram-memory 30GiB --batch 4,8,16 --only speed --models opt-13b --contexts 1920 \
    --policies exact,flexgen,moe_lightning,bounded
  compare "sizes" 2304 $one --only speed --models $small --contexts 2K --policies $full
  compare "sizes of OPT" 2048 $one --only speed --models $opt --contexts 1920 --policies $full
  compare "lengths, Qwen" 33024 $one --only speed --models qwen2.5-7b --contexts $all --policies $full,$rows
  compare "lengths, others" 33024 $one --only speed --models llama-3.1-8b --contexts $all --policies $rows
  # These add up each prompt's probabilities, which takes four times as long at twice the length.
  compare "lengths, adding up" 16640 $one --only speed --models llama-3.1-8b --contexts 2K,4K,8K,16K --policies $sums
  compare "sizes, others" 2304 $one --only speed --models $small --contexts 2K --policies $rows,$sums
  compare "sizes of OPT, others" 2048 $one --only speed --models $opt --contexts 1920 --policies $rows,$sums
  compare "timelines" 8448 $one --only timeline --models llama-3.1-8b --contexts 8K --policies exact,moe_lightning,hybridgen
  # Of those whose steps differ by little: in the same minutes. The report does not know of it.
  for shape in opt-1.3b opt-2.7b opt-6.7b opt-13b llama-3.2-1b llama-3.2-3b qwen2.5-1.5b qwen2.5-14b; do
    turns $shape 1x1856
  done
  turns llama-3.1-8b 1x2048,1x4096,1x8192,1x16384,1x32768
  turns qwen2.5-7b 1x2048,1x4096,1x8192,1x16384,1x32768
  stage "peers" "$python" "$repo/bench/peers/compare.py" --report "$report" --shape llama-3.1-8b --contexts 2048,16384 \
    --steps 24 --wait 2 --timeout 300 --scratch "$scratch" \
    --variants gpu-ambidex-exact,gpu-transformers-offloaded,gpu-transformers-dynamic
  compare "lengths, quality" 33024 $one --only quality --models llama-3.1-8b --contexts $all --policies $chosen
  compare "lengths, others, quality" 33024 $one --only quality --models llama-3.1-8b --contexts 4K,16K,32K --policies $rows
  compare "lengths, adding up, quality" 16640 $one --only quality --models llama-3.1-8b --contexts 4K,16K --policies $sums
  compare "lengths, Qwen, quality" 33024 $one --only quality --models qwen2.5-7b --contexts $all --policies $chosen
  # It keeps rows beside the blocks.
  compare "batches, hybridgen" 2048 $many --dram-memory 58GiB --batch 4,8,16 --only speed --models opt-13b --contexts 1920 \
    --policies hybridgen
  stage "peers, half the weights" "$python" "$repo/bench/peers/compare.py" --report "$report" --shape llama-3.1-8b \
    --contexts 2048 --steps 16 --wait 2 --timeout 300 --scratch "$scratch" --variants gpu-ambidex-half-weights,gpu-accelerate
  compare "lengths, Qwen, adding up" 16640 $one --only speed --models qwen2.5-7b --contexts 2K,4K,8K,16K --policies $sums
  compare "batches, others" 2048 $many --dram-memory 58GiB --batch 16 --only speed --models opt-13b --contexts 1920 --policies $rows,$sums
}
