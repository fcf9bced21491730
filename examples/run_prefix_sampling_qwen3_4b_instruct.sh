#!/usr/bin/env bash
# Prefix Sampling, Qwen3-4B-Instruct-2507 on AceReason-Math-Subset: 8 rollouts for each of 128 groups, of which the
# skewed ones are rolled out again in the next step from a prefix of their own. BASELINE=1: the same without prefixes.
# Arguments are passed on and win: `bash examples/run_prefix_sampling_qwen3_4b_instruct.sh --cfg job` shows the whole
# configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen3_4b_instruct
MODEL_SIZE=4b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B-Instruct-2507}
NNODES=${NNODES:-2}
source "$(dirname "${BASH_SOURCE[0]}")/prefix_ace_reason_math.sh"

train_prefix_sampling "$@"
