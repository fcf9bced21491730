#!/usr/bin/env bash
# Pilot-Commit, Qwen2.5-Math-1.5B on DeepMath-103K: recipe/pilot_commit/config/experiment/qwen2_5_math_1_5b.yaml
exec bash "$(dirname "$0")/train.sh" pilot_commit qwen2_5_math_1_5b "$@"
