#!/usr/bin/env bash
# Pilot-Commit, Qwen3-14B-Base on Polaris-53K: 16 rollouts for 3 x 128 prompts, 48 more for 128 that survive, 12,288 a
# step. N=16, the limited budget: 8 and 8, 4,096 a step.
# Arguments are passed on and win: `bash examples/run_pilot_commit_qwen3_14b.sh --cfg job` shows the whole
# configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=qwen3_14b
MODEL_SIZE=14b
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-14B-Base}
AMPLE=64
DATA=polaris_53k
RESPONSE=4096
STEPS=500
source "$(dirname "${BASH_SOURCE[0]}")/pilot_commit_math.sh"

train pilot_commit "${PILOT_COMMIT[@]}" "$@"
