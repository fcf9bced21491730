#!/usr/bin/env bash
# ablation.sh <recipe> <experiment> [key=value ...]: train.sh for a run that is named after its overrides, and so has checkpoints
# of its own: bash examples/ablation.sh pilot_commit qwen3_8b rollout_policy.p_upper=1.0 trains pilot_commit_qwen3_8b-p_upper-1.0
set -euo pipefail
(($# >= 2)) || { echo "error: name a recipe and an experiment: ablation.sh pilot_commit qwen3_8b [key=value ...]" >&2; exit 2; }
name=$1_$2
for variable in RECIPE N ESTIMATOR LENGTH BASELINE MODEL_PATH TRAIN_FILES; do
  [[ -z ${!variable:-} ]] || name+=-$variable-${!variable}
done
for override in "${@:3}"; do
  [[ $override != *=* ]] || name+=-${override#*rollout_policy.}  # with a hyphen: a report reads _8 at the end as a seed
done
name=$(tr -c '[:alnum:]._\n' - <<<"$name")
exec bash "$(dirname "$0")/train.sh" "$1" "$2" trainer.experiment_name="$name" "${@:3}"
