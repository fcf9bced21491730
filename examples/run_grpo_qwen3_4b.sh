#!/usr/bin/env bash
# GRPO, a baseline of Pilot-Commit, Qwen3-4B-Base on Polaris-53K: recipe/grpo/config/experiment/pilot_commit_qwen3_4b.yaml
exec bash "$(dirname "$0")/train.sh" grpo pilot_commit_qwen3_4b "$@"
