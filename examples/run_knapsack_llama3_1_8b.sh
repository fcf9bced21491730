#!/usr/bin/env bash
# Knapsack-RL, Llama-3.1-8B-Instruct on MATH (Appendix G, table 5): 2,048 rollouts a step over 256 prompts (N=4, N=16:
# 1,024, 4,096), 2 to 128 each by what their gradient is expected to be worth. RECIPE=grpo: the uniform baseline, N for
# every prompt. ESTIMATOR=reinforce_plus_plus: its advantages. One update a step, all on-policy.
# Arguments are passed on and win: `bash examples/run_knapsack_llama3_1_8b.sh --cfg job` shows the whole configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=llama3_1_8b
MODEL_SIZE=8b
MODEL_PATH=${MODEL_PATH:-meta-llama/Llama-3.1-8B-Instruct}
DATA=math12k
MINI_BATCH=256
source "$(dirname "${BASH_SOURCE[0]}")/knapsack_math.sh"

train_method knapsack "$@"
