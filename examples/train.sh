#!/usr/bin/env bash
# train.sh <recipe> <experiment> [key=value ...]: python -m recipe.<recipe> experiment=<experiment>, from this checkout.
# The settings are in recipe/<recipe>/config/experiment/<experiment>.yaml. Overrides on the command line win over them
# and over these environment variables, each of which stands for an override:
#   NNODES, GPUS_PER_NODE            trainer.nnodes, trainer.n_gpus_per_node
#   HARDWARE, MODEL_SIZE             hardware (h100, h200, a100, a800, b200, cpu, verl), model_size (1_5b, 4b, 8b, ...)
#   MODEL_PATH                       actor_rollout_ref.model.path: a folder, or a model's name on the hub
#   TRAIN_FILES, VAL_FILES           data.train_files, data.val_files: parquet files in verl's schema
#   N                                rollouts per prompt, on average: the paper's other budgets
#   ESTIMATOR                        HORA: grpo, rloo. VIP: rloo, dr_grpo. Knapsack-RL: grpo, reinforce_plus_plus
#   LENGTH                           Knapsack-RL: tokens of prompt and response together
#   TOOLS                            Prefix Sampling's agents: a file of tools like swe_tools.yaml
#   RECIPE=grpo, BASELINE=1          the baseline: uniform GRPO; for Prefix Sampling, the recipe without prefixes
# DATA_DIR (~/data) and CHECKPOINT_DIR (checkpoints) are read by the experiments themselves. PYTHON is the interpreter.
set -euo pipefail
(($# >= 2)) || { echo "error: name a recipe and an experiment: train.sh pilot_commit qwen3_8b [key=value ...]" >&2; exit 2; }
recipe=$1 experiment=$2
shift 2
here=$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}    # this checkout, whichever version is installed

refuse() { echo "error: $1=${!1} is not valid: $2" >&2; exit 2; }

IFS=: read -ra folders <<<"$PWD:$PYTHONPATH"
found=
for folder in "${folders[@]}"; do [[ ! -d $folder/recipe/$recipe ]] || found=1; done
[[ -n $found ]] || refuse recipe "name a folder in $(cd "$here/../recipe" && pwd)"
PYTHON=${PYTHON:-python}
type -P "$PYTHON" >/dev/null || refuse PYTHON "it cannot be started; activate the environment, or set PYTHON"

paper=$recipe                                             # whose settings these are
case $experiment in pilot_commit_*) paper=pilot_commit ;; esac

case $paper/${RECIPE:-$recipe} in
  */"$recipe") ;;
  prefix_sampling/*) refuse RECIPE "the baseline is this recipe without prefixes, use BASELINE=1" ;;
  */grpo) recipe=grpo experiment=${paper}_${experiment#pilot_commit_} ;;
  *) refuse RECIPE "use $recipe, or grpo for the baseline" ;;
esac

settings=()
case $paper/${N:-} in
  */) ;;
  pilot_commit/128 | pilot_commit/64 | pilot_commit/32 | pilot_commit/16)
    if [[ $recipe == pilot_commit ]]; then settings+=(budget="n$N")
    else settings+=(actor_rollout_ref.rollout.n="$N"); fi ;;
  pilot_commit/*) refuse N "use 128, 64 or 16, the paper's, or 32" ;;
  vip/* | knapsack/*) settings+=(actor_rollout_ref.rollout.n="$N") ;;
  *) refuse N "the paper has one budget; for another, pass actor_rollout_ref.rollout.n=$N" ;;
esac
case $paper/${ESTIMATOR:-} in
  */) ;;
  hora/grpo | hora/rloo | vip/rloo | knapsack/grpo) settings+=(algorithm.adv_estimator="$ESTIMATOR") ;;
  vip/dr_grpo)
    settings+=(algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false)
    if [[ $recipe == vip ]]; then settings+=(rollout_policy.gradient=dr_grpo); fi ;;
  # REINFORCE++ itself takes no baseline within a prompt, which the recipes need; this is its form for groups.
  knapsack/reinforce_plus_plus) settings+=(algorithm.adv_estimator=reinforce_plus_plus_baseline) ;;
  hora/*) refuse ESTIMATOR "use grpo or rloo" ;;
  vip/*) refuse ESTIMATOR "use rloo or dr_grpo" ;;
  knapsack/*) refuse ESTIMATOR "use grpo or reinforce_plus_plus" ;;
  *) refuse ESTIMATOR "the paper has one; for another, pass algorithm.adv_estimator=$ESTIMATOR" ;;
esac
case $paper/${BASELINE:-0} in
  */0) ;;
  prefix_sampling/1) settings+=(rollout_policy.use_prefixes=false) ;;
  prefix_sampling/*) refuse BASELINE "use 1 for the matched baseline, or 0" ;;
  *) refuse BASELINE "the baseline is another recipe, use RECIPE=grpo" ;;
esac
case $paper/${LENGTH:-} in
  */) ;;
  knapsack/*[!0-9]*) refuse LENGTH "use a number of tokens above 2048" ;;
  knapsack/*)
    ((10#$LENGTH > 2048)) || refuse LENGTH "use a number of tokens above 2048"
    settings+=(data.max_response_length=$((10#$LENGTH - 2048))) ;;
  *) refuse LENGTH "pass data.max_response_length" ;;
esac
case "$paper $* " in "hora"*" model_engine=megatron "*) settings+=(lr_schedule=linear) ;; esac
if [[ $experiment == *_swe ]]; then
  TOOLS=${TOOLS:-$here/swe_tools.yaml}
  [[ -f $TOOLS ]] || refuse TOOLS "name a file of tools, like examples/swe_tools.yaml"
  settings+=(actor_rollout_ref.rollout.multi_turn.tool_config_path="\"$TOOLS\"")
fi

# Hydra's quotes are for folders such as lr=1e-6. Data can also be a list, [a.parquet,b.parquet], and has none.
exec "$PYTHON" -m "recipe.$recipe" experiment="$experiment" \
  ${HARDWARE:+hardware="$HARDWARE"} ${MODEL_SIZE:+model_size="$MODEL_SIZE"} \
  ${MODEL_PATH:+actor_rollout_ref.model.path="\"$MODEL_PATH\""} \
  ${NNODES:+trainer.nnodes="$NNODES"} ${GPUS_PER_NODE:+trainer.n_gpus_per_node="$GPUS_PER_NODE"} \
  ${TRAIN_FILES:+data.train_files="$TRAIN_FILES"} ${VAL_FILES:+data.val_files="$VAL_FILES"} \
  "${settings[@]}" "$@"
