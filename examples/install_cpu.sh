#!/usr/bin/env bash
# Makes .venv at the project's root: verl, Ray, vLLM and FSDP on a machine without a GPU, every version pinned.
# A second run does nothing if nothing has changed. PYTHON=... chooses the interpreter.
set -euo pipefail

TORCH=2.13.0
MINORS="11 12"
NEEDED_GB=4  # 3 GB were measured, package cache included

CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/install_common.sh

install_torch() {
  # If pip's configured sources have no CPU build, plain "torch" installs a CUDA build of several GB. So the CPU build
  # is named by its full version and fetched from PyTorch's own index.
  "$VENV/bin/python" -m pip install --no-deps --no-compile "torch==$TORCH+cpu" ||
    "$VENV/bin/python" -m pip install --no-deps --no-compile "torch==$TORCH+cpu" --index-url https://download.pytorch.org/whl/cpu ||
    { echo "Neither pip's sources nor PyTorch's index could be reached for a CPU build of torch for this Python." && false; }
}

FINGERPRINT=cpu-$(cat requirements/cpu.txt pyproject.toml examples/install_{common,cpu}.sh | sha256sum | cut -d' ' -f1)
if is_installed "$FINGERPRINT"; then
  echo "$VENV is up to date."
  exit 0
fi

check_machine "the CPU stack"
make_environment "the CPU stack"
"$VENV/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
  refuse "vLLM's CPU build needs libnuma.so.1: apt-get install libnuma1 (Debian), or dnf install numactl-libs (Fedora)."
phase "torch $TORCH, CPU build (about 200 MB)" install_torch
phase "verl, Ray, vLLM and $(grep -c == requirements/cpu.txt) packages in all" uv_install -r requirements/cpu.txt
phase "this project" uv_install --no-build-isolation -e .
installed "$FINGERPRINT"
