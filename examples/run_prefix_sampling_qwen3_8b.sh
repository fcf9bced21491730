#!/usr/bin/env bash
# Prefix Sampling, Qwen3-8B without thinking on AceReason-Math-Subset: recipe/prefix_sampling/config/experiment/qwen3_8b.yaml
exec bash "$(dirname "$0")/train.sh" prefix_sampling qwen3_8b "$@"
