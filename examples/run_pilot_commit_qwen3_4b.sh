#!/usr/bin/env bash
# Pilot-Commit, Qwen3-4B-Base on Polaris-53K: recipe/pilot_commit/config/experiment/qwen3_4b.yaml
exec bash "$(dirname "$0")/train.sh" pilot_commit qwen3_4b "$@"
