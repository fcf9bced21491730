#!/usr/bin/env bash
# Prefix Sampling, Qwen3-32B as an agent on R2E-Gym-Subset: 8 rollouts of at most 100 turns for each of 64 groups, of
# which the skewed ones are rolled out again in the next step from a prefix of their own, replayed in a sandbox.
# BASELINE=1: the same without prefixes.
# Arguments are passed on and win: `bash examples/run_prefix_sampling_qwen3_32b_swe.sh --cfg job` shows the whole
# configuration.
set -euo pipefail
MODEL_NAME=qwen3_32b_swe
MODEL_SIZE=14b                                   # there is none for 32B: all that depends on it is below
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-32B}
RESPONSE=65536
TURNS=100
STEPS=420                                        # ours: the paper's baseline peaks at step 410
source "$(dirname "${BASH_SOURCE[0]}")/prefix_swe.sh"
SETTINGS+=(
  # Computed as in docs/hardware.md for 32.8 B parameters (64 layers of width 5120, 8 key-value heads of 128) on 32
  # B200; not measured. vLLM: 126 GB a GPU, 16 GB of them weights; the longest sequence has 18 GB of KV cache, 23 fit
  # on 4 GPUs. The update splits a sequence over 4 GPUs, 24,576 tokens on each need 62 GB; log-probs need 50 GB; the
  # training state 16 GB.
  actor_rollout_ref.rollout.tensor_model_parallel_size=4
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768
  actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
  # Qwen3-32B declares 40,960 positions, fewer than 4,096 + 65,536, and the paper does not say how it went beyond:
  # raised here for training and for vLLM. verl cannot set YaRN: for that, put it into the config.json of a copy of the
  # model.
  +actor_rollout_ref.model.override_config.max_position_embeddings=69632
  +actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.max_position_embeddings=69632
)

train_prefix_sampling "$@"
