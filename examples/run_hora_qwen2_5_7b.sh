#!/usr/bin/env bash
# HORA, Qwen2.5-7B on MATH12k (table 5): recipe/hora/config/experiment/qwen2_5_7b.yaml
exec bash "$(dirname "$0")/train.sh" hora qwen2_5_7b "$@"
