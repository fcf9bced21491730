#!/usr/bin/env bash
# Knapsack-RL, Qwen3-4B-Instruct-2507 on DAPO-Math-17K: recipe/knapsack/config/experiment/qwen3_4b_instruct.yaml
exec bash "$(dirname "$0")/train.sh" knapsack qwen3_4b_instruct "$@"
