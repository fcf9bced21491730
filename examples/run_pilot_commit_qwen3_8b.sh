#!/usr/bin/env bash
# Pilot-Commit: 16 rollouts for 3 x 128 prompts, 48 more for 128 that survive, 12,288 a step.
# Arguments are passed on and win: `bash examples/run_pilot_commit_qwen3_8b.sh --cfg job` shows the whole configuration.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/qwen3_8b.sh"

train pilot_commit \
  rollout_policy.n_pilot=16 \
  rollout_policy.n_commit=48 \
  rollout_policy.s=3 \
  rollout_policy.p_lower=0.125 \
  rollout_policy.p_upper=0.75 \
  rollout_policy.p_solve=1.0 \
  rollout_policy.max_delay=4 \
  "$@"
