#!/usr/bin/env bash
# Builds .venv-bench: what is in .venv, and the implementations that `megatron-basp bench attention` compares with;
# `make bench` runs this. Transformer Engine is among them where `make test-te` has compiled it for this user already;
# without it the benchmark takes its form.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/package_index.sh

deepspeed=0.19.8
yunchang=0.6.4
stamp=.venv-bench/setup-stamp # written last, so that an interrupted set-up has none
uv=.venv/bin/uv
python=.venv-bench/bin/python

say() { printf 'bench: %s\n' "$*" >&2; }

# The wheel that scripts/te_on_cpu.sh keeps: of its version of Transformer Engine, for the torch in the lock.
te_version=$(sed -n 's/^version=//p' scripts/te_on_cpu.sh)
torch=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' requirements.lock)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/megatron-basp/transformer-engine
tag=$(.venv/bin/python -c 'import sys; print(sys.implementation.cache_tag)')
te_wheel=$(compgen -G "$cache/$te_version-torch$torch-$tag/*.whl" || true)

fingerprint() { { pwd; echo "$te_wheel"; cat "${BASH_SOURCE[0]}" requirements.lock setup.py; } | cksum; }
if [[ -e $stamp && $(fingerprint) == "$(<"$stamp")" ]]; then exit; fi

follow_pip_settings python3 -m pip
say "building .venv-bench"
"$uv" venv --quiet --clear --no-project --python .venv/bin/python .venv-bench
"$uv" pip sync --quiet --python "$python" requirements.lock
"$uv" pip install --quiet --python "$python" --no-deps --no-build-isolation --editable .
# With what they import, but with no package of the lock in another version. Built without isolation: DeepSpeed's
# set-up imports torch.
"$uv" pip install --quiet --python "$python" --constraint requirements.lock --no-build-isolation \
    "deepspeed==$deepspeed" "yunchang==$yunchang"
if [[ -n $te_wheel ]]; then
    "$uv" pip install --quiet --python "$python" --no-deps \
        "transformer-engine==$te_version" "transformer-engine-cu13==$te_version"
    "$uv" pip install --quiet --python "$python" --constraint requirements.lock "$te_wheel"
fi
fingerprint >"$stamp"
say "done: .venv-bench"
