#!/usr/bin/env bash
# HORA, Qwen2.5-7B on MATH12k (table 5): 8 pre-rollouts for each of 60 prompts, then 1,440 where a correct one is
# likeliest to follow, 1,920 a step. RECIPE=grpo: the uniform baseline, 32 for every prompt, all else the same.
# ESTIMATOR=rloo: leave-one-out advantages (table 6).
# Arguments are passed on and win: `bash examples/run_hora_qwen2_5_7b.sh --cfg job` shows the whole configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen2_5_7b
MODEL_SIZE=8b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B}
GPUS_PER_NODE=${GPUS_PER_NODE:-6}
source "$(dirname "${BASH_SOURCE[0]}")/hora_math12k.sh"
SETTINGS+=(
  actor_rollout_ref.rollout.gpu_memory_utilization=0.65   # ours: 6 GPUs hold more training state each than 8
)

train_method hora "$@"
