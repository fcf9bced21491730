#!/usr/bin/env bash
# Knapsack-RL, Qwen3-4B-Base on DAPO-Math-17K: recipe/knapsack/config/experiment/qwen3_4b_base.yaml
exec bash "$(dirname "$0")/train.sh" knapsack qwen3_4b_base "$@"
