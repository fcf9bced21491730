#!/usr/bin/env bash
# HORA, Qwen2.5-3B on MATH12k (table 4): recipe/hora/config/experiment/qwen2_5_3b.yaml
exec bash "$(dirname "$0")/train.sh" hora qwen2_5_3b "$@"
