#!/usr/bin/env bash
# Prefix Sampling, Qwen3-14B as an agent on R2E-Gym-Subset: recipe/prefix_sampling/config/experiment/qwen3_14b_swe.yaml
exec bash "$(dirname "$0")/train.sh" prefix_sampling qwen3_14b_swe "$@"
