#!/usr/bin/env bash
# Knapsack-RL, Llama-3.1-8B-Instruct on MATH (Appendix G, table 5): recipe/knapsack/config/experiment/llama3_1_8b.yaml
exec bash "$(dirname "$0")/train.sh" knapsack llama3_1_8b "$@"
