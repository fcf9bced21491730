#!/usr/bin/env bash
# HORA, Qwen2.5-1.5B-Instruct on MATH12k (table 3): recipe/hora/config/experiment/qwen2_5_1_5b.yaml
exec bash "$(dirname "$0")/train.sh" hora qwen2_5_1_5b "$@"
