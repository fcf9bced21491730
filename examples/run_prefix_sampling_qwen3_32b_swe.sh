#!/usr/bin/env bash
# Prefix Sampling, Qwen3-32B as an agent on R2E-Gym-Subset: 8 rollouts of at most 100 turns for each of 64 groups, of
# which the skewed ones are rolled out again in the next step from a prefix of their own, replayed in a sandbox.
# BASELINE=1: the same without prefixes.
# Arguments are passed on and win: `bash examples/run_prefix_sampling_qwen3_32b_swe.sh --cfg job` shows the whole
# configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen3_32b_swe
MODEL_SIZE=32b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-32B}
RESPONSE=65536
TURNS=100
STEPS=420
source "$(dirname "${BASH_SOURCE[0]}")/prefix_swe.sh"
SETTINGS+=(
  # Qwen3-32B declares 40,960 positions, fewer than 4,096 + 65,536, and the paper does not say how it went beyond:
  # raised here for training and for vLLM. verl cannot set YaRN: for that, put it into the config.json of a copy of
  # the model.
  +actor_rollout_ref.model.override_config.max_position_embeddings=69632
  +actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.max_position_embeddings=69632
)

train_prefix_sampling "$@"
