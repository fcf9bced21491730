#!/usr/bin/env bash
# VIP, Llama-3.2-3B-Instruct on DAPO-Math-17k: recipe/vip/config/experiment/llama3_2_3b.yaml
exec bash "$(dirname "$0")/train.sh" vip llama3_2_3b "$@"
