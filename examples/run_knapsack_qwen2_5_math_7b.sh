#!/usr/bin/env bash
# Knapsack-RL, Qwen2.5-Math-7B on DAPO-Math-17K: recipe/knapsack/config/experiment/qwen2_5_math_7b.yaml
exec bash "$(dirname "$0")/train.sh" knapsack qwen2_5_math_7b "$@"
