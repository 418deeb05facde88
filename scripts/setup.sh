#!/usr/bin/env bash
# Builds .venv from requirements.lock; `make setup` runs it. Needs bash and any Python 3 with pip; touches only .venv
# and the cache of the user. uv installs: it keeps one copy of every package per user and links it into each clone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/package_index.sh

wanted='CPython 3.12 or 3.13' # what megatron-core 0.19 has wheels for
stamp=.venv/setup-stamp       # written last, so that an interrupted set-up has none

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

# Prints the interpreter behind a command (out of any virtual environment) if it is a wanted one. Running it is the only
# proof: pyenv leaves a shim on PATH for every version it has, and those of inactive versions fail.
probe() {
    "$1" -c 'import sys
if sys.implementation.name != "cpython" or sys.version_info[:2] not in ((3, 12), (3, 13)) or sys.abiflags:
    sys.exit(1)  # abiflags: free-threaded and debug builds take none of the wheels
print(sys._base_executable)' 2>/dev/null
}

candidates() {
    type -aP python3.12 python3.13 python3 || true
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python {/usr/local,/opt,/opt/*}/bin/python3.1[23]
}

find_python() {
    local candidate
    while read -r candidate; do
        probe "$candidate" && return
    done < <(candidates)
    return 1
}

# What .venv was made from. The folder counts too: scripts in .venv/bin and the editable install hold absolute paths.
fingerprint() { { pwd; cat requirements.lock setup.py .venv/pyvenv.cfg; } 2>/dev/null | cksum; }

up_to_date() {
    [[ -x .venv/bin/python && -e $stamp && $(fingerprint) == "$(<"$stamp")" ]] &&
        [[ -z ${PYTHON:-} || $python -ef .venv/bin/python ]]
}

# Sets `pip` to a command: the wanted Python's, else that of any other, since some distributions' come without.
find_pip() {
    local candidate
    for candidate in "$python" python3 /usr/bin/python3; do
        pip=("$candidate" -m pip)
        "${pip[@]}" --version >/dev/null 2>&1 && return
    done
    fail "no Python here has pip; install it (Debian: python3-pip) and run this again"
}

# Sets `uv`: the version in the lock, installed where no Python sees it. Built aside and moved into place whole, since
# another clone may do the same at this moment; whoever comes second keeps the first one's.
bootstrap_uv() {
    local version cache home scratch
    version=$(sed -n 's/^uv==//p' requirements.lock)
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/megatron-basp
    home=$cache/uv-$version-$(uname -m)
    uv=$home/bin/uv
    [[ ! -x $uv ]] || return 0
    say "fetching the installer, uv $version (about 20 MB, some seconds)"
    mkdir -p "$cache"
    scratch=$(mktemp -d "$cache/tmp-XXXXXX")
    # shellcheck disable=SC2064 # the name is local: expand it now
    trap "rm -rf '$scratch'" EXIT
    # Settings that forbid --target outside a virtual environment do not concern it.
    PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 "${pip[@]}" install -qq --disable-pip-version-check \
        --only-binary :all: --no-deps --target "$scratch" "uv==$version" ||
        fail "'${pip[*]}' could not install uv $version; it takes Python 3.8 or newer and a package index"
    mv -T "$scratch" "$home" 2>/dev/null || [[ -x $uv ]] || fail "could not write $home"
}

download_python() {
    say "no $wanted on this machine; asking uv for one (about 30 MB)"
    "$uv" python install --quiet --no-bin 3.12 2>/dev/null && python=$("$uv" python find --no-project 3.12 2>/dev/null)
}

python=
if [[ -n ${PYTHON:-} ]]; then
    python=$(probe "$PYTHON") || fail "PYTHON=$PYTHON is not a working $wanted"
fi
if up_to_date; then exit; fi

# One set-up at a time in a clone. Where this lock is not to be had (some network file systems), go on without.
exec 9<.
flock 9 2>/dev/null || true
if up_to_date; then exit; fi

[[ -n $python ]] || python=$(find_python) || python=
find_pip
follow_pip_settings "${pip[@]}"
bootstrap_uv
[[ -n $python ]] || download_python ||
    fail "found no $wanted (looked on PATH, in ${PYENV_ROOT:-$HOME/.pyenv}/versions, /usr/local and /opt; uv could" \
        "not download one); install one, or name yours: make setup PYTHON=/path/to/python3.12"

# From scratch each time: a package that was interrupted half-way can look complete, and linking takes seconds.
# What was added to .venv by hand goes with it.
say "building .venv with $python"
"$uv" venv --quiet --clear --no-project --python "$python" .venv
say "installing requirements.lock, 5.6 GB (seconds from uv's cache; the first time, minutes of download)"
"$uv" pip sync --python .venv/bin/python requirements.lock
# Built with the setuptools of the lock, hence without isolation.
"$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
fingerprint >"$stamp"
say "done: commands are in .venv/bin"
