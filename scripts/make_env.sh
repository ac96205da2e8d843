#!/usr/bin/env bash
# Make the virtual environment VENV, install the project into it and touch STAMP: make_env.sh VENV STAMP
#
# PYTHON=/path/to/python chooses the interpreter; otherwise the first usable one of `candidates` is taken. An existing
# VENV that works is kept and brought up to date, so an interrupted run goes on where it stopped.
set -euo pipefail

readonly venv=$1 stamp=$2
looked_for=()

# Print the interpreters to try, best first. megatron-core 0.19 comes as a wheel for 3.12 and 3.13; a newer Python builds
# it from source, which takes a C++ compiler, and is therefore tried last.
candidates() {
    if [[ -n ${PYTHON:-} ]]; then
        printf '%s\n' "$PYTHON"
        return
    fi
    local minor
    for minor in 12 13; do
        printf 'python3.%s\n' "$minor"
        pyenv_pythons "$minor"
    done
    printf '%s\n' python3 python
    for minor in 14 15; do
        printf 'python3.%s\n' "$minor"
        pyenv_pythons "$minor"
    done
}

# Print pyenv's interpreters of Python 3.$1, newest first. pyenv's own python3.N commands work only for a version that
# is switched on, so the versions are looked up by path.
pyenv_pythons() {
    local root=${PYENV_ROOT:-$HOME/.pyenv} pattern found
    pattern="$root/versions/3.$1.*/bin/python3.$1"
    found=$(compgen -G "$pattern" | sort -rV) || found=$pattern
    printf '%s\n' "$found"
}

# Print nothing and succeed when the interpreter can make the environment, else print why not.
why_unusable() {
    command -v -- "$1" >/dev/null || { echo "not found"; return 1; }
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || {
        "$1" -c 'import platform; print(platform.python_version(), "is older than 3.12")' 2>/dev/null ||
            echo "does not start"
        return 1
    }
    "$1" -c 'import ensurepip, venv' 2>/dev/null || {
        echo "has no venv or ensurepip module (on Debian: apt-get install python3-venv)"
        return 1
    }
}

find_python() {
    local candidate reason
    while IFS= read -r candidate; do
        if reason=$(why_unusable "$candidate"); then
            python=$candidate
            return 0
        fi
        looked_for+=("$candidate: $reason")
    done < <(candidates)
    return 1
}

fail_without_python() {
    {
        echo "make env: no usable Python found; Python 3.12 or newer with venv is needed. Looked for:"
        printf '  %s\n' "${looked_for[@]}"
        echo "Install one (best 3.12), or name one: make env PYTHON=/path/to/python3.12"
    } >&2
    exit 1
}

works() {
    "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

SECONDS=0
if ! works; then
    find_python || fail_without_python
    echo "make env: $("$python" -c 'import platform, sys; print("Python", platform.python_version(), "at", sys.executable)')"
    "$python" -m venv --clear "$venv"
fi
echo "make env: installing the project, torch and megatron-core into $venv (about 5 GB unpacked, minutes)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
touch "$stamp"
echo "make env: ready in $SECONDS s, $(du -sh "$venv" | cut -f1) in $venv"
