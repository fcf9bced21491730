#!/usr/bin/env bash
# DAPO: 64 rollouts for each of 3 x 128 prompts, 24,576 a round; groups without reward spread are discarded.
# Arguments are passed on and win: `bash examples/run_dapo_qwen3_8b.sh --cfg job` shows the whole configuration.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/qwen3_8b.sh"

train dapo \
  actor_rollout_ref.rollout.n=64 \
  rollout_policy.s=3 \
  "$@"
