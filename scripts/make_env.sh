#!/usr/bin/env bash
# Make the virtual environment VENV for one version of Megatron, install the project into it and touch STAMP:
# make_env.sh HOST VENV STAMP
#
# PYTHON=/path/to/python chooses the interpreter; otherwise the first usable one of `candidates` is taken. An existing
# VENV that works is kept and brought up to date, so an interrupted run goes on where it stopped. Everything comes from
# the package index; if it offers torch for CPUs only (2.7.1+cpu), pip prefers that.
set -euo pipefail

readonly host=$1 venv=$2 stamp=$3
looked_for=()

# The families of versions, the oldest first. The newest is the one that the project is developed with.
known=()
while IFS= read -r line; do
    [[ ! $line =~ ^\ *(MegatronFamily\()?name=\"([0-9.]+)\" ]] || known+=("${BASH_REMATCH[2]}")
done <"${BASH_SOURCE[0]%/*}/../vtp_plugin/host/versions/known_versions.py"
newest=${known[-1]}
extras=demo,test,host-${host/./-}
[[ $host != "$newest" ]] || extras=browser,demo,dev,hf,lora,site,tune,host-${host/./-}

# pythons: minor versions of Python 3 that have wheels of this Megatron, best first; known_versions.py has the same.
# packages, no_deps: what pip installs, and what it installs without dependencies.
case $host in
    0.12) # torch is exact: it is the version that MindSpeed's users have. Megatron's metadata asks for wandb,
          # tensorstore, nvidia-modelopt and others that it does not import. Its checkpoints need numpy 1. six and what
          # follows, here and below: NVIDIA's script and megatron.training of a tree import them.
        pythons=(10 11) packages=('.[demo,test]' 'torch==2.7.1' 'numpy<2' psutil six regex einops pyyaml) no_deps=('megatron-core>=0.12.1,<0.13') ;;
    0.16) # the oldest torch that its wheels allow
        pythons=(11 10 12) packages=(".[$extras]" 'torch>=2.6,<2.7' six regex einops pyyaml pydantic) no_deps=() ;;
    swift) # ms-swift's Megatron; its own bounds on transformers and datasets are below ours
        pythons=(12 13) packages=(".[test,host-${newest/./-}]" 'ms-swift==4.6.0' 'mcore-bridge==1.6.5') no_deps=() ;;
    *)
        [[ " ${known[*]} " == *" $host "* ]] || {
            others=$(printf '%s, ' "${known[@]:0:${#known[@]}-1}")
            echo "make env: HOST=$host is unknown; use HOST=${others%, } or $newest, or swift" >&2
            exit 1
        }
        pythons=(12 13) packages=(".[$extras]" pyyaml) no_deps=() ;;
esac
readonly pythons packages no_deps
wanted="Python $(printf '3.%s or ' "${pythons[@]}")"
readonly wanted=${wanted% or }

# Print the interpreters to try, best first.
candidates() {
    if [[ -n ${PYTHON:-} ]]; then
        printf '%s\n' "$PYTHON"
        return
    fi
    local minor
    for minor in "${pythons[@]}"; do
        printf 'python3.%s\n' "$minor"
        pyenv_pythons "$minor"
    done
    printf '%s\n' python3 python
}

# Print pyenv's interpreters of Python 3.$1, newest first. pyenv's own python3.N commands work only for a version that
# is switched on, so the versions are looked up by path.
pyenv_pythons() {
    local root pattern found
    root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
    pattern="$root/versions/3.$1.*/bin/python3.$1"
    found=$(compgen -G "$pattern" | sort -rV) || found=$pattern
    printf '%s\n' "$found"
}

# Exit with 0 if the interpreter is one of the versions that were named.
readonly is_wanted='import sys; sys.exit(sys.version_info[:2] not in [(3, int(minor)) for minor in sys.argv[1:]])'

# Print nothing and succeed when the interpreter can make the environment, else print why not.
why_unusable() {
    command -v -- "$1" >/dev/null || { echo "not found"; return 1; }
    "$1" -c "$is_wanted" "${pythons[@]}" 2>/dev/null || {
        "$1" -c 'import platform; print("is Python", platform.python_version())' 2>/dev/null || echo "does not start"
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
        echo "make env: no usable Python found; HOST=$host (megatron-core $host) needs $wanted, with venv. Looked for:"
        printf '  %s\n' "${looked_for[@]}"
        echo "Install one, or name one: make env HOST=$host PYTHON=/path/to/python3.${pythons[0]}"
    } >&2
    exit 1
}

works() {
    "$venv/bin/python" -c "import pip; $is_wanted" "${pythons[@]}" 2>/dev/null
}

# Not compiled: that takes a minute for the newest host, and few of the 14,000 modules are ever imported.
install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

SECONDS=0
if ! works; then
    find_python || fail_without_python
    echo "make env: $("$python" -c 'import platform, sys; print("Python", platform.python_version(), "at", sys.executable)')"
    "$python" -m venv --clear "$venv"
    # Most of it is there already, where this Python made the environment of the newest Megatron.
    own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') other=.venv${own#"$venv"}
    if [[ $host == swift && -e .venv/.env-ready && -d $other ]]; then
        rm -rf "$own" && cp -al "$other" "$own" 2>/dev/null || cp -a "$other" "$own"
    fi
fi
echo "make env: installing the project, torch and megatron-core $host into $venv (about 5 GB unpacked, minutes)"
install --editable "${packages[@]}"
[[ ${#no_deps[@]} -eq 0 ]] || install --no-deps "${no_deps[@]}"
touch "$stamp"
echo "make env: ready in $SECONDS s, $(du -sh "$venv" | cut -f1) in $venv"
