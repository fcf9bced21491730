#!/usr/bin/env bash
# Knapsack-RL, Qwen2.5-Math-7B on DeepScaleR (Appendix G, table 6): 2,048 rollouts a step over 256 prompts (N=4, N=16:
# 1,024, 4,096), 2 to 128 each by what their gradient is expected to be worth. RECIPE=grpo: the uniform baseline, N for
# every prompt. ESTIMATOR=reinforce_plus_plus: its advantages.
# Arguments are passed on and win: `bash examples/run_knapsack_qwen2_5_math_7b_deepscaler.sh --cfg job` shows the whole
# configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen2_5_math_7b
MODEL_SIZE=8b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}
DATA=deepscaler
source "$(dirname "${BASH_SOURCE[0]}")/knapsack_math.sh"

train_method knapsack "$@"
