# Makes .venv and installs the project in it; read by quickstart and test, not run by itself.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
CONSTRAINTS=$ROOT/scripts/constraints-cpu.txt
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "$@"; }

fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# set_up NAME [EXTRA]: the environment with the extra requirements EXTRA of pyproject.toml, if it is not there yet.
set_up() {
    local extra=${2:-} gpu=no made made_from stamp
    if has_gpu; then gpu=yes; fi
    made="root=$ROOT gpu=$gpu"
    stamp="$VENV/mtabench-$1"
    made_from="$made $(cat "$ROOT/pyproject.toml" "$CONSTRAINTS" "$ROOT/scripts/setup.sh" | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$made_from" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
        return
    fi
    make_venv "$made" "$gpu"
    install_project "$extra" "$gpu"
    say "$made_from" | tee "$stamp" >"$VENV/mtabench-run" # whatever the extra, what a run needs is there
}

make_venv() {
    local made=$1 gpu=$2 python options=()
    if [ -f "$VENV/mtabench-made" ]; then
        if [ "$(cat "$VENV/mtabench-made")" = "$made" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
            return
        fi
        say "Making .venv anew: it was for another folder or another machine, or it is broken."
        rm -rf "$VENV"
    elif [ -e "$VENV" ]; then
        if ! is_new_enough "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
            fail "$VENV is there, was not made by this script, and has no Python 3.11 or later with pip; move it away."
        fi
        say "Using the .venv that is already there."
        return
    fi
    python=$(find_python "$gpu")
    say "Making .venv with $("$python" --version) ($(command -v "$python"))."
    mkdir "$VENV"
    say "$made" >"$VENV/mtabench-made" # first, so that a run that is stopped here knows it for its own
    if [ "$gpu" = yes ] && has_cuda_torch "$python"; then
        say "PyTorch with CUDA is installed on this machine: using it."
        options=(--system-site-packages)
    fi
    "$python" -m venv ${options[@]+"${options[@]}"} "$VENV" || fail "python could not make $VENV; see above"
    if [ ${#options[@]} -gt 0 ]; then
        # $python may itself live in a virtual environment, which --system-site-packages does not look into.
        "$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
            >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mtabench-system.pth"
    fi
}

# The first Python that will do; with a GPU, rather one that has PyTorch with CUDA.
find_python() {
    local python found="" candidates=(python3 python3.14 python3.13 python3.12 python3.11 python)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for python in "${candidates[@]}"; do
        if is_new_enough "$python" && "$python" -c 'import venv, ensurepip' 2>/dev/null; then
            found=${found:-$python}
            if [ "$1" = yes ] && has_cuda_torch "$python"; then
                found=$python
                break
            fi
        fi
    done
    if [ -n "$found" ]; then
        say "$found"
        return
    fi
    for python in "${candidates[@]}"; do
        if is_new_enough "$python"; then
            fail "$python ($("$python" --version)) has no venv module or no pip to put into one." \
                "On Debian and Ubuntu, install it with: apt-get install python3-venv"
        fi
    done
    fail "no Python 3.11 or later was found${PYTHON:+ as PYTHON=$PYTHON}; install one, or name it: PYTHON=/path/to/python3 $0"
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

has_cuda_torch() {
    "$1" -c '
import sys, torch
version = tuple(int(part) for part in torch.__version__.split(".")[:2])
sys.exit(version < (2, 10) or not torch.cuda.is_available())' >/dev/null 2>&1
}

install_project() {
    local extra=$1 gpu=$2 options=() log=$VENV/pip.log
    if [ "$gpu" = yes ]; then
        say "Installing mtabench and what it needs. Without PyTorch on this machine that is several GB and many minutes."
    else
        say "Installing mtabench and what it needs, without GPU parts: one to five minutes the first time."
        options=(-c "$CONSTRAINTS")
        # PyPI's PyTorch for Linux brings CUDA along, and a Triton of its own; builds for the CPU have an index.
        if [ "$(uname -s)" = Linux ] && ! "$VENV/bin/python" -m pip install -q --dry-run --no-deps \
            "torch==$(sed -n 's/^torch==//p' "$CONSTRAINTS")+cpu" >/dev/null 2>&1; then
            options+=(--extra-index-url "$CPU_INDEX")
        fi
    fi
    # Python compiles what is imported when it is; all of PyTorch at once would take half a minute.
    (cd "$ROOT" && "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile \
        ${options[@]+"${options[@]}"} -e ".${extra:+[$extra]}" 2>&1) | tee "$log" | show_progress || {
        tail -n 15 "$log" >&2
        fail "pip could not install what mtabench needs; its last words are above, the rest is in .venv/pip.log." \
            "Check the network, the proxy settings and the room on the disk, then run this again: nothing done is lost." \
            "If pip finds no torch for this Python ($("$VENV/bin/python" --version)), remove .venv and name an older" \
            "or newer Python: PYTHON=python3.12 $0"
    }
    say "Installed in .venv."
}

show_progress() {
    awk '/^ *Downloading / { split($2, part, "-"); print "  Downloading " part[1] " " part[2] " " $3 " " $4; fflush() }
         /^Installing collected/ { print "  Unpacking and installing"; fflush() }'
}
