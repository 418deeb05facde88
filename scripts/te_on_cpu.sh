#!/usr/bin/env bash
# Builds .venv-te: what is in .venv, and Transformer Engine so that its Python part runs without a GPU; `make test-te`
# runs this. The wheel of its torch extension is compiled once for a user (10 to 30 minutes) and kept in the cache.
#
#   scripts/te_on_cpu.sh [--wheel FILE]     FILE: a wheel of transformer-engine-torch that is there already
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/package_index.sh

version=2.20.2
cache=${XDG_CACHE_HOME:-$HOME/.cache}/megatron-basp/transformer-engine
stamp=.venv-te/setup-stamp # written last, so that an interrupted set-up has none
uv=.venv/bin/uv
python=.venv-te/bin/python

say() { printf 'te: %s\n' "$*" >&2; }

wheel=
if [[ ${1:-} == --wheel ]]; then wheel=$2; fi

fingerprint() { { pwd; cat "${BASH_SOURCE[0]}" requirements.lock setup.py; } | cksum; }
if [[ -z $wheel && -e $stamp && $(fingerprint) == "$(<"$stamp")" ]]; then exit; fi

follow_pip_settings python3 -m pip
say "building .venv-te"
"$uv" venv --quiet --clear --no-project --python .venv/bin/python .venv-te
"$uv" pip sync --quiet --python "$python" requirements.lock
"$uv" pip install --quiet --python "$python" --no-deps --no-build-isolation --editable .
# Its core is a library for CUDA that loads without a driver, prebuilt.
"$uv" pip install --quiet --python "$python" --no-deps "transformer-engine==$version" "transformer-engine-cu13==$version"

# One wheel for each torch that it was compiled against.
torch=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' requirements.lock)
home=$cache/$version-torch$torch-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
if [[ -z $wheel ]]; then wheel=$(compgen -G "$home/*.whl" || true); fi
if [[ -z $wheel ]]; then
    say "compiling transformer-engine-torch $version on the CPU: 10 to 30 minutes, once"
    # What it is compiled with, and the headers of CUDA that no package in the lock brings. No nvcc is needed: the
    # extension is host code.
    "$uv" pip install --quiet --python "$python" pip wheel pybind11 ninja nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
    # FORCE_BUILD: no prebuilt wheel from GitHub, where there is none for this torch. NVIDIA_WHEELS: headers from the
    # packages, not from a toolkit that may be of another version. NCCL_EP: needs NCCL's device API. One job: a compiler
    # takes 1.5 GB.
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0 MAX_JOBS=${MAX_JOBS:-1} \
        "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$scratch" \
        "transformer-engine-torch==$version"
    mkdir -p "$home"
    mv "$scratch"/*.whl "$home"
    wheel=$(compgen -G "$home/*.whl")
fi
# With what it imports, but with no package of the lock in another version.
"$uv" pip install --quiet --python "$python" --constraint requirements.lock "$wheel"
fingerprint >"$stamp"
say "done: .venv-te"
