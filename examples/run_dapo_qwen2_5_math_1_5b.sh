#!/usr/bin/env bash
# DAPO, Qwen2.5-Math-1.5B on DeepMath-103K: 128 rollouts for each of 3 x 128 prompts, 49,152 a round; groups without
# reward spread are discarded. N=16, the limited budget: 6,144 a round.
# Arguments are passed on and win: `bash examples/run_dapo_qwen2_5_math_1_5b.sh --cfg job` shows the whole
# configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen2_5_math_1_5b
MODEL_SIZE=1_5b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-Math-1.5B}
AMPLE=128
DATA=deepmath_103k
RESPONSE=8192
STEPS=1000
source "$(dirname "${BASH_SOURCE[0]}")/pilot_commit_math.sh"
SETTINGS+=(
  # The model declares 4,096 positions, fewer than the paper's responses are long, and the paper does not say how it
  # went beyond: raised here for training and for vLLM.
  +actor_rollout_ref.model.override_config.max_position_embeddings=9216
  +actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.max_position_embeddings=9216
)

train dynamic_sampling "${DAPO[@]}" "$@"
