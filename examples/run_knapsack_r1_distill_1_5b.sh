#!/usr/bin/env bash
# Knapsack-RL, DeepSeek-R1-Distill-Qwen-1.5B on DAPO-Math-17K: 2,048 rollouts a step over 256 prompts (N=4, N=16: 1,024,
# 4,096), 2 to 128 each by what their gradient is expected to be worth. RECIPE=grpo: the uniform baseline, N for every
# prompt. ESTIMATOR=reinforce_plus_plus: its advantages. Of 8,192 tokens at most.
# Arguments are passed on and win: `bash examples/run_knapsack_r1_distill_1_5b.sh --cfg job` shows the whole
# configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=r1_distill_1_5b
MODEL_SIZE=1_5b
MODEL_PATH=${MODEL_PATH:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}
LENGTH=${LENGTH:-8192}
DATA=dapo_math_17k
source "$(dirname "${BASH_SOURCE[0]}")/knapsack_math.sh"

train_method knapsack "$@"
