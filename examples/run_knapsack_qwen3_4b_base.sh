#!/usr/bin/env bash
# Knapsack-RL, Qwen3-4B-Base on DAPO-Math-17K: 2,048 rollouts a step over 256 prompts (N=4, N=16: 1,024, 4,096), 2 to
# 128 each by what their gradient is expected to be worth. RECIPE=grpo: the uniform baseline, N for every prompt.
# ESTIMATOR=reinforce_plus_plus: its advantages.
# Arguments are passed on and win: `bash examples/run_knapsack_qwen3_4b_base.sh --cfg job` shows the whole
# configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen3_4b_base
MODEL_SIZE=4b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B-Base}
DATA=dapo_math_17k
source "$(dirname "${BASH_SOURCE[0]}")/knapsack_math.sh"

train_method knapsack "$@"
