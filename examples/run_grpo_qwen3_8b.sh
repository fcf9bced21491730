#!/usr/bin/env bash
# GRPO: 64 rollouts for each of 128 prompts, 8,192 a step.
# Arguments are passed on and win: `bash examples/run_grpo_qwen3_8b.sh --cfg job` shows the whole configuration.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/qwen3_8b.sh"

train grpo \
  actor_rollout_ref.rollout.n=64 \
  "$@"
