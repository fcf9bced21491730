#!/usr/bin/env bash
# HORA, Qwen2.5-3B on MATH12k (table 4): 8 pre-rollouts for each of 60 prompts, then 1,440 where a correct one is
# likeliest to follow, 1,920 a step. RECIPE=grpo: the uniform baseline, 32 for every prompt, all else the same.
# ESTIMATOR=rloo: leave-one-out advantages, which the paper has for 7B only.
# Arguments are passed on and win: `bash examples/run_hora_qwen2_5_3b.sh --cfg job` shows the whole configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen2_5_3b
MODEL_SIZE=4b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B}
GPUS_PER_NODE=${GPUS_PER_NODE:-3}
source "$(dirname "${BASH_SOURCE[0]}")/hora_math12k.sh"
SETTINGS+=(
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7    # ours: 3 GPUs hold more training state each than 8
)

train_method hora "$@"
