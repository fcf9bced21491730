#!/usr/bin/env bash
# Prefix Sampling, Qwen3-4B-Instruct-2507 on AceReason-Math-Subset: recipe/prefix_sampling/config/experiment/qwen3_4b_instruct.yaml
exec bash "$(dirname "$0")/train.sh" prefix_sampling qwen3_4b_instruct "$@"
