#!/usr/bin/env bash
# Knapsack-RL, Qwen3-4B-Base on DAPO-Math-17K: 2,048 rollouts a step over 256 prompts, 2 to 128 each by what their
# gradient is expected to be worth. RECIPE=grpo: the uniform baseline, 8 for every prompt.
# Arguments are passed on and win: `bash examples/run_knapsack_qwen3_4b_base.sh --cfg job` shows the
# whole configuration.
set -euo pipefail
MODEL_NAME=qwen3_4b_base
MODEL_SIZE=4b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B-Base}
source "$(dirname "${BASH_SOURCE[0]}")/knapsack_dapo_math.sh"

train_method knapsack "$@"
