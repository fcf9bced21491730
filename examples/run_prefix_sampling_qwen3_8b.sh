#!/usr/bin/env bash
# Prefix Sampling, Qwen3-8B without thinking on AceReason-Math-Subset: 8 rollouts for each of 128 groups, of which the
# skewed ones are rolled out again in the next step from a prefix of their own. BASELINE=1: the same without prefixes.
# Arguments are passed on and win: `bash examples/run_prefix_sampling_qwen3_8b.sh --cfg job` shows the whole
# configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen3_8b
MODEL_SIZE=8b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
NNODES=${NNODES:-4}
source "$(dirname "${BASH_SOURCE[0]}")/prefix_ace_reason_math.sh"
SETTINGS+=(
  +data.apply_chat_template_kwargs.enable_thinking=false
)

train_prefix_sampling "$@"
