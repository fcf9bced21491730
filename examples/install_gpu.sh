#!/usr/bin/env bash
# Makes .venv at the project's root for NVIDIA GPUs: verl 0.9.1 with FSDP2 for CUDA 13.0 and Python 3.12, every version pinned,
# from verl's own wheels. A second run does nothing if nothing has changed.
#   ENGINE=vllm|sglang   engine of the rollouts (vllm)
#   MEGATRON=1           adds Megatron for model_engine=megatron; needs git and github.com
#   PYTHON=...           chooses the interpreter
# The driver must be R580 or newer where the runs start. It is not needed here, so a login node will do.
set -euo pipefail

ENGINE=${ENGINE:-vllm}
MEGATRON=${MEGATRON:-0}
MINORS=12      # verl's own wheels are for Python 3.12 only
NEEDED_GB=20   # from the sizes of the wheels: about 5 GB of downloads, 12 GB installed
DRIVER=580     # the first driver of CUDA 13.0
GLIBC=2.34     # of sglang's and llguidance's wheels

# Compile once here: a run starts seven processes, and with PYTHONDONTWRITEBYTECODE set each compiles all its imports. The
# CPU stack has fewer processes, which import a quarter of the code, and is installed faster without.
export UV_COMPILE_BYTECODE=1

CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/install_common.sh

older() { [[ $1 != "$2" && $(printf '%s\n' "$1" "$2" | sort -V | head -1) == "$1" ]]; }

check_gpus() {
  local glibc driver
  glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2) || true
  ! older "${glibc:-0}" "$GLIBC" ||
    refuse "the GPU stack needs glibc $GLIBC or newer (Ubuntu 22.04, Debian 12, RHEL 9), and this is ${glibc:-another libc}; use the container (docker/Dockerfile)."
  [[ $MEGATRON == 0 ]] || command -v git >/dev/null || refuse "MEGATRON=1 installs megatron-core from git: install git."
  command -v nvidia-smi >/dev/null || { echo "No GPU here: the driver (R$DRIVER or newer) is checked at the first run."; return; }
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1) || true
  ! older "${driver:-0}" "$DRIVER" || refuse "CUDA 13.0 needs driver R$DRIVER or newer, and this machine has ${driver:-none that answers}."
}

case $ENGINE in vllm | sglang) ;; *) refuse "ENGINE=$ENGINE is not valid: use vllm or sglang." ;; esac
case $MEGATRON in
  0) lock=requirements/gpu_$ENGINE.txt wheels=(-r requirements/gpu_wheels.txt) ;;
  1) lock=requirements/gpu_${ENGINE}_megatron.txt
    wheels=(-r requirements/gpu_wheels.txt -r requirements/gpu_wheels_megatron.txt) ;;
  *) refuse "MEGATRON=$MEGATRON is not valid: use 1, or 0 for FSDP2 alone." ;;
esac

FINGERPRINT=gpu-$ENGINE-$MEGATRON-$(cat requirements/gpu_* pyproject.toml examples/install_{common,gpu}.sh | sha256sum | cut -d' ' -f1)
if is_installed "$FINGERPRINT"; then
  echo "$VENV is up to date."
  exit 0
fi

check_machine "the GPU stack"
check_gpus
make_environment "the GPU stack"
# verl's order: torch and the engine first, since the wheels below are linked against that torch.
phase "verl, torch, $ENGINE and $(grep -c == "$lock") packages in all (about 5 GB)" uv_install -r "$lock"
phase "verl's own wheels: ${wheels[*]//-r /}" uv_install "${wheels[@]}"
phase "this project" uv_install --no-build-isolation -e .
phase "check" "$VENV/bin/python" docker/smoke_test.py --hardware h200 --engine "$ENGINE" --megatron "$MEGATRON"
installed "$FINGERPRINT"
