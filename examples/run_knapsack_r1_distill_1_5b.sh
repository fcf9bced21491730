#!/usr/bin/env bash
# Knapsack-RL, DeepSeek-R1-Distill-Qwen-1.5B on DAPO-Math-17K: recipe/knapsack/config/experiment/r1_distill_1_5b.yaml
exec bash "$(dirname "$0")/train.sh" knapsack r1_distill_1_5b "$@"
