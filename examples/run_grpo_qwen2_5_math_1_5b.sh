#!/usr/bin/env bash
# GRPO, a baseline of Pilot-Commit, Qwen2.5-Math-1.5B on DeepMath-103K: recipe/grpo/config/experiment/pilot_commit_qwen2_5_math_1_5b.yaml
exec bash "$(dirname "$0")/train.sh" grpo pilot_commit_qwen2_5_math_1_5b "$@"
