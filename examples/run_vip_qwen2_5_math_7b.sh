#!/usr/bin/env bash
# VIP, Qwen2.5-Math-7B on DAPO-Math-17k: recipe/vip/config/experiment/qwen2_5_math_7b.yaml
exec bash "$(dirname "$0")/train.sh" vip qwen2_5_math_7b "$@"
