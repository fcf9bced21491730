#!/usr/bin/env bash
# Knapsack-RL, Qwen2.5-Math-7B on DeepScaleR (Appendix G, table 6): recipe/knapsack/config/experiment/qwen2_5_math_7b_deepscaler.yaml
exec bash "$(dirname "$0")/train.sh" knapsack qwen2_5_math_7b_deepscaler "$@"
