#!/usr/bin/env bash
# DAPO, a baseline of Pilot-Commit, Qwen3-14B-Base on Polaris-53K: recipe/dynamic_sampling/config/experiment/pilot_commit_qwen3_14b.yaml
exec bash "$(dirname "$0")/train.sh" dynamic_sampling pilot_commit_qwen3_14b "$@"
