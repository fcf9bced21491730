#!/usr/bin/env bash
# VIP, Llama-3.2-3B-Instruct on DAPO-Math-17k: 8 rollouts (N=16: 16) for each of 512 prompts on average, divided so that
# the predicted variance of the gradient is least. ESTIMATOR=dr_grpo instead of rloo; RECIPE=grpo: the uniform baseline.
# Arguments are passed on and win: `bash examples/run_vip_llama3_2_3b.sh --cfg job` shows the whole configuration.
# Written by examples/write_scripts.py from settings.yaml: change that.
set -euo pipefail
MODEL_NAME=llama3_2_3b
MODEL_SIZE=4b
MODEL_PATH=${MODEL_PATH:-meta-llama/Llama-3.2-3B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/vip_dapo_math.sh"

train_method vip "$@"
