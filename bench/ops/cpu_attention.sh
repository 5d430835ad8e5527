#!/bin/sh
# On a machine without a development environment: builds the native module and the C++ tests with what is there (cmake,
# ninja, a C++17 compiler, python3 with torch, nanobind, pytest), runs every test of native attention with each
# instruction set of the machine, then the benchmark. About 3 minutes on 16 cores.
#
#   bench/ops/cpu_attention.sh [cpu_bounded.py] [arguments of cpu_attention.py, or of the benchmark named first]
set -eu
cd "$(dirname "$0")/../.."
bench=cpu_attention.py
case ${1-} in *.py) bench=$1; shift ;; esac
python=$(command -v python3)
cmake -G Ninja -S . -B build/tests -DAMBIDEX_BUILD_TESTS=ON > /dev/null
cmake --build build/tests > /dev/null
ctest --test-dir build/tests --output-on-failure
cmake -G Ninja -S . -B build/module -DPython_EXECUTABLE="$python" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" > /dev/null
cmake --build build/module > /dev/null 2>&1
cp build/module/_native*.so src/ambidex/
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'from ambidex.kernels.cpu import native; print("instruction sets:", *native.available_isas())'
"$python" -m pytest -q -p no:cacheprovider -n 8 tests/ops/test_ops_kv_tiles.py tests/ops/test_ops_native_attention.py \
  tests/ops/test_ops_native.py tests/ops/test_ops_native_bounded.py || echo "tests failed; measuring all the same"
exec "$python" "bench/ops/$bench" "$@"
