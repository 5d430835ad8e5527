#!/bin/bash
# Runs the tests that need a GPU (`-m gpu`), in groups side by side on one GPU, the riskiest first, each with a limit in
# seconds and a log of its own. Prints a line a group; fails if one failed or took too long.
#
#   tests/gpu.sh [GROUP...]      all groups by default; --list names them
#
# PYTHON (python3) is the interpreter, whatever PYTHONPATH says it finds; it needs pytest and what the tests import, no
# network. GPU_TEST_SIDE (5) groups run at once, each on cores of its own; those that measure times or take the GPU's
# memory run alone, behind the others. GPU_TEST_LOGS (build/gpu-tests) gets the logs; GPU_TEST_SCALE (1) multiplies all
# limits.
#
# A test that hangs in a call of the driver hears no signal: when its group's time is up the log gets the stacks of all
# threads (SIGABRT), and the process, with the kernel that waits for ever, is killed.
set -u
ulimit -c 0
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
logs=${GPU_TEST_LOGS:-build/gpu-tests}
side=${GPU_TEST_SIDE:-5}
scale=${GPU_TEST_SCALE:-1}

# name | limit in seconds | what pytest is told. Files that one group names, `rest` leaves out.
beside=(
  "ahead|300|tests/faults/test_faults_ahead_gpu.py"
  "in-turn|300|tests/parity/test_engine_steps_ahead.py tests/parity/test_engine_decode_steps.py"
  "lanes|300|tests/faults/test_faults_lanes.py tests/faults/test_faults_races.py tests/unit/storage/test_storage_step_stream.py tests/faults/test_faults_early.py"
  "presets|420|tests/parity/test_engine_lane_presets.py"
  "bounded|420|tests/engine/test_engine_bounded.py tests/engine/test_engine_hot.py"
  "early|420|tests/parity/test_engine_policy_steps.py tests/engine/test_engine_policy.py"
  "weights|420|tests/parity/test_engine_placements.py tests/parity/test_engine_quantized_placements.py tests/faults/test_faults_weights.py tests/parity/test_engine_sparsity.py"
  "ops-attention|480|tests/ops/test_ops_attention.py tests/ops/test_ops_attend_paged.py tests/ops/test_ops_attend_scanned.py tests/ops/test_ops_attend_early.py tests/ops/test_ops_attend_predicted.py tests/ops/test_ops_attend_held.py tests/ops/test_ops_attend_pages.py tests/ops/test_ops_attend_chosen.py tests/ops/test_ops_attend_tiles.py"
  "ops-tiles|480|tests/ops/test_ops_tile_blocks.py tests/ops/test_ops_quantized_gpu.py"
  "tiers|420|tests/unit/attention tests/parity/test_engine_splits.py"
)
alone=(
  "memory|120|tests/faults/test_faults_memory.py"
  "times|300|tests/unit/calibrate/test_calibrate_gpu.py tests/faults/test_faults_cxl.py tests/parity/test_engine_tuned_weights.py"
  "cells|240|tests/unit/compare/test_compare_run.py tests/server/test_server_worker.py"
)
named=$(printf '%s\n' "${beside[@]}" "${alone[@]}" | cut -d'|' -f3)
rest=tests; for path in $named; do rest="$rest --ignore=$path"; done
beside+=("rest|480|--continue-on-collection-errors $rest")

if [ "${1:-}" = --list ]; then printf '%s\n' "${beside[@]}" "${alone[@]}" | cut -d'|' -f1; exit; fi
for name in "$@"; do
  printf '%s\n' "${beside[@]}" "${alone[@]}" | cut -d'|' -f1 | grep -qxF -- "$name" \
  || { echo "there is no group '$name': see tests/gpu.sh --list" >&2; exit 2; }
done
for path in $named; do [ -e "$path" ] || { echo "$path is not there" >&2; exit 2; }; done
"$python" -c 'import sys, pytest, torch; sys.exit("torch sees no GPU" if not torch.cuda.is_available() else 0)' || exit 2

settings=(-p no:cacheprovider -m gpu -v --durations=10 -o console_output_style=classic)
if "$python" -c 'import pytest_timeout' 2> /dev/null; then
  settings+=(--timeout=180)
else  # its settings and marks are not known then
  settings+=(-o addopts=-ra -W ignore::pytest.PytestConfigWarning -W ignore::pytest.PytestUnknownMarkWarning)
fi

run_group() {  # GROUP CORES
  local name limit arguments log begin=$SECONDS code result last run=()
  IFS='|' read -r name limit arguments <<< "$1"
  limit=$((limit * scale)) log="$logs/$name.log"
  [ -z "$2" ] || run=(taskset -c "$2")
  # shellcheck disable=SC2086  # the arguments are words
  "${run[@]}" timeout -s ABRT -k 15 "$limit" "$python" -m pytest "${settings[@]}" $arguments > "$log" 2>&1
  code=$?
  case $code in
    0) result=passed ;;
    5) result="FAILED: has no tests" ;;
    124 | 134 | 137) result="OUT OF TIME" ;;
    *) result="FAILED: code $code" ;;
  esac
  [ $code -eq 0 ] || echo "$name" >> "$logs/failed"
  last=$(tail -n 1 "$log")
  [[ $last = *" in "*s* ]] || last="at $(grep -a '^tests/.*::' "$log" | tail -n 1)"  # it was cut off there
  printf '%-14s %-20s %4d of %d s  %s  %s\n' "$name" "$result" $((SECONDS - begin)) "$limit" \
    "$(tr -d '=' <<< "$last" | sed 's/^ *//; s/ *$//' | cut -c 1-120)" "$log"
}

run_some() {  # CORES: groups that nobody has taken, one after another
  local place name
  for place in "${!beside[@]}"; do
    name=${beside[place]%%|*}
    is_wanted "$name" && mkdir "$logs/taken-$name" 2> /dev/null && run_group "${beside[place]}" "$1"
  done
}

wanted=" $* "
is_wanted() { [ -z "${wanted// /}" ] || [[ $wanted = *" $1 "* ]]; }

mkdir -p "$logs"; rm -rf "$logs"/*.log "$logs"/taken-* "$logs/failed"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
for place in $(seq 0 $((side - 1))); do
  cores=
  if command -v taskset > /dev/null; then
    cores=$("$python" -c "import os; cores = sorted(os.sched_getaffinity(0)); num = max(1, len(cores) // $side)
print(*(cores[($place * num + i) % len(cores)] for i in range(num)), sep=',')")
  fi
  run_some "$cores" &
done
wait
for group in "${alone[@]}"; do
  is_wanted "${group%%|*}" && run_group "$group" ""
done
rm -rf "$logs"/taken-*
[ ! -e "$logs/failed" ] || { echo "failed: $(paste -sd, "$logs/failed")"; exit 1; }
echo "all groups passed after $SECONDS s"
