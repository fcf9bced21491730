#!/usr/bin/env bash
# Prefix Sampling, Qwen3-14B as an agent on R2E-Gym-Subset: 8 rollouts of at most 50 turns for each of 64 groups, of
# which the skewed ones are rolled out again in the next step from a prefix of their own, replayed in a sandbox.
# BASELINE=1: the same without prefixes.
# Arguments are passed on and win: `bash examples/run_prefix_sampling_qwen3_14b_swe.sh --cfg job` shows the whole
# configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen3_14b_swe
MODEL_SIZE=14b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-14B}
RESPONSE=32768
TURNS=50
STEPS=300
source "$(dirname "${BASH_SOURCE[0]}")/prefix_swe.sh"

train_prefix_sampling "$@"
