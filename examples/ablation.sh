#!/usr/bin/env bash
# ablation.sh <recipe> <experiment> [key=value ...]: train.sh, with a name and thus checkpoints of their own for these overrides:
#   bash examples/ablation.sh pilot_commit qwen3_8b rollout_policy.p_upper=1.0   trains pilot_commit_qwen3_8b_p_upper_1.0
set -euo pipefail
name=$1_$2
for override in "${@:3}"; do
  key=${override%%=*} value=${override#*=}
  name+=_${key##*.}_${value##*/}
done
exec bash "$(dirname "$0")/train.sh" "$@" trainer.experiment_name="$(tr -c '[:alnum:]._\n' _ <<<"$name")"
