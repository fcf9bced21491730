#!/usr/bin/env bash
# DAPO, a baseline of Pilot-Commit, Qwen2.5-Math-1.5B on DeepMath-103K: recipe/dynamic_sampling/config/experiment/pilot_commit_qwen2_5_math_1_5b.yaml
exec bash "$(dirname "$0")/train.sh" dynamic_sampling pilot_commit_qwen2_5_math_1_5b "$@"
