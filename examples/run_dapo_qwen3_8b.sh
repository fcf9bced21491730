#!/usr/bin/env bash
# DAPO, Qwen3-8B-Base on Polaris-53K: 64 rollouts for each of 3 x 128 prompts, 24,576 a round; groups without reward
# spread are discarded. N=16, the limited budget: 6,144 a round.
# Arguments are passed on and win: `bash examples/run_dapo_qwen3_8b.sh --cfg job` shows the whole configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen3_8b
MODEL_SIZE=8b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B-Base}
AMPLE=64
DATA=polaris_53k
RESPONSE=4096
STEPS=500
source "$(dirname "${BASH_SOURCE[0]}")/pilot_commit_math.sh"

train dynamic_sampling "${DAPO[@]}" "$@"
