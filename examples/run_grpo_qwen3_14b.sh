#!/usr/bin/env bash
# GRPO, a baseline of Pilot-Commit, Qwen3-14B-Base on Polaris-53K: recipe/grpo/config/experiment/pilot_commit_qwen3_14b.yaml
exec bash "$(dirname "$0")/train.sh" grpo pilot_commit_qwen3_14b "$@"
