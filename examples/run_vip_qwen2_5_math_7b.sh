#!/usr/bin/env bash
# VIP, Qwen2.5-Math-7B on DAPO-Math-17k: 8 rollouts (N=16: 16) for each of 512 prompts on average, divided so that the
# predicted variance of the gradient is least. ESTIMATOR=dr_grpo instead of rloo; RECIPE=grpo: the uniform baseline.
# Arguments are passed on and win: `bash examples/run_vip_qwen2_5_math_7b.sh --cfg job` shows the whole configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen2_5_math_7b
MODEL_SIZE=8b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}
source "$(dirname "${BASH_SOURCE[0]}")/vip_dapo_math.sh"
SETTINGS+=(
  "${LONGER[@]}"
)

train_method vip "$@"
