#!/usr/bin/env bash
# Makes .venv at the project's root: verl, Ray, vLLM and FSDP on a machine without a GPU, every version pinned.
# A second run does nothing if nothing has changed. PYTHON=... chooses the interpreter.
set -euo pipefail

TORCH=2.13.0
UV=0.13.8
NEEDED_GB=4  # 3 GB were measured, package cache included

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=$PWD/.venv
STAMP=$VENV/.install_cpu
LOG=$VENV/install.log

refuse() { echo "error: $1" >&2; exit 2; }

fingerprint() { cat requirements/cpu.txt pyproject.toml examples/install_cpu.sh | sha256sum | cut -d' ' -f1; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

python_of_a_supported_version() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12}; do
    if supported "$candidate"; then echo "$candidate"; return; fi
  done
  local found
  found=$("${PYTHON:-python3}" --version 2>&1 | head -1) || found="none"
  refuse "the CPU stack needs Python 3.11 or 3.12 (found: $found); install one of them or name it with PYTHON=/path/to/python."
}

check_machine() {
  [[ $(uname -sm) == "Linux x86_64" ]] || refuse "the CPU stack is built for Linux x86_64, and this is $(uname -sm)."
  local free_gb
  free_gb=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1024 / 1024))
  ((free_gb >= NEEDED_GB)) || refuse "installing needs about $NEEDED_GB GB of disk, and $PWD has $free_gb GB free."
}

phase() {  # phase <description> <command>...: shows the command's last line and its seconds; all output goes to the log
  local what=$1
  shift
  if ! "$@" 2>&1 | tee -a "$LOG" | "$VENV/bin/python" examples/quickstart/follow.py lines "$what"; then
    tail -n 15 "$LOG" >&2
    echo "error: '$what' failed; all of its output is in $LOG." >&2
    exit 1
  fi
}

install_torch() {
  # If pip's configured sources have no CPU build, plain "torch" installs a CUDA build of several GB. So the CPU build
  # is named by its full version and fetched from PyTorch's own index.
  "$VENV/bin/python" -m pip install --no-deps "torch==$TORCH+cpu" ||
    "$VENV/bin/python" -m pip install --no-deps "torch==$TORCH+cpu" --index-url https://download.pytorch.org/whl/cpu ||
    { echo "Neither pip's sources nor PyTorch's index could be reached for a CPU build of torch for this Python." && false; }
}

# Compile once here: a run starts seven processes, and with PYTHONDONTWRITEBYTECODE set each compiles all its imports.
uv_install() { "$VENV/bin/python" -m uv pip install --python "$VENV/bin/python" --no-deps --compile-bytecode "$@"; }

if [[ -f $STAMP && $(<"$STAMP") == "$(fingerprint)" ]]; then
  echo "$VENV is up to date."
  exit 0
fi

check_machine
if [[ -e $VENV/bin/python ]]; then
  supported "$VENV/bin/python" || refuse "$VENV holds $("$VENV/bin/python" --version 2>&1), and the CPU stack needs Python 3.11 or 3.12: remove that folder."
else
  PYTHON=$(python_of_a_supported_version)
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "$PYTHON cannot make virtual environments; install its venv module (on Debian: apt-get install python3-venv)."
  "$PYTHON" -m venv "$VENV"
fi
rm -f "$STAMP"
: >"$LOG"

echo "Installing into $VENV"
phase "installer (uv $UV)" "$VENV/bin/python" -m pip install "uv==$UV"
phase "torch $TORCH, CPU build (about 200 MB)" install_torch
phase "verl, Ray, vLLM and $(grep -c == requirements/cpu.txt) packages in all" uv_install -r requirements/cpu.txt
phase "this project" uv_install --no-build-isolation -e .
fingerprint >"$STAMP"
echo "Done in $SECONDS s. Activate it with: source ${VENV}/bin/activate"
