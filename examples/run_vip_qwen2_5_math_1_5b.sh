#!/usr/bin/env bash
# VIP, Qwen2.5-Math-1.5B on DAPO-Math-17k: recipe/vip/config/experiment/qwen2_5_math_1_5b.yaml
exec bash "$(dirname "$0")/train.sh" vip qwen2_5_math_1_5b "$@"
