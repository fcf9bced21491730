#!/usr/bin/env bash
# HORA, Qwen2.5-1.5B-Instruct on MATH12k (table 3): 8 pre-rollouts for each of 60 prompts, then 1,440 where a correct
# one is likeliest to follow, 1,920 a step. RECIPE=grpo: the uniform baseline, 32 for every prompt, all else the same.
# ESTIMATOR=rloo: leave-one-out advantages, which the paper has for 7B only.
# Arguments are passed on and win: `bash examples/run_hora_qwen2_5_1_5b.sh --cfg job` shows the whole configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen2_5_1_5b
MODEL_SIZE=1_5b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-1.5B-Instruct}
GPUS_PER_NODE=${GPUS_PER_NODE:-3}
source "$(dirname "${BASH_SOURCE[0]}")/hora_math12k.sh"

train_method hora "$@"
