# Sourced by the files of settings (pilot_commit_math.sh, hora_math12k.sh, vip_dapo_math.sh, knapsack_math.sh, prefix_*.sh):
# how a run is started, without a setting of any paper. They set, with defaults of their own:
#   NAME                                of the setting; runs and their checkpoints are called <recipe>_$NAME
#   NNODES, GPUS_PER_NODE, HARDWARE     HARDWARE is h200, a800 or b200: docs/hardware.md
#   MODEL_PATH                          a folder, or a model's name on the hub
#   MODEL_SIZE                          1_5b, 4b, 8b, 14b or 32b, the nearest that is not smaller; without it 8b
#   TRAIN_FILES, VAL_FILES              parquet files in verl's format
#   SETTINGS                            overrides that every method shares
#   METHOD                              overrides that one method alone knows, for train_method
# From the environment, with these defaults:
DATA_DIR=${DATA_DIR:-$HOME/data}
CHECKPOINT_DIR=${CHECKPOINT_DIR:-checkpoints}    # each run gets a folder of its own in it
PYTHON=${PYTHON:-python}
#
# On several nodes: docs/cluster.md.

# This checkout, whichever one happens to be installed.
PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH

train() {  # train <recipe> <settings of the method>... <the user's arguments>...
  local recipe=$1 size=${MODEL_SIZE:-} common overrides=() flags=() argument
  shift
  for argument in "$@"; do
    case $argument in
      hardware=*) HARDWARE=${argument#*=} ;;      # hydra takes it once only, and the next as well
      model_size=*) size=${argument#*=} ;;
      -*) flags+=("$argument") ;;
      *=* | \~*) overrides+=("$argument") ;;
      *) flags+=("$argument") ;;                  # the value of a flag: --cfg job
    esac
  done
  case $HARDWARE in cpu | verl) size= ;; esac     # profiles without a table of sizes
  common=(
    hardware="$HARDWARE"
    ${size:+"model_size=$size"}
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$GPUS_PER_NODE"

    data.train_files="$TRAIN_FILES"
    data.val_files="$VAL_FILES"
    data.filter_overlong_prompts=true
    actor_rollout_ref.model.path="$MODEL_PATH"

    trainer.save_freq=20
    trainer.max_actor_ckpt_to_keep=2
    trainer.resume_mode=auto
    "trainer.logger=[console,wandb]"
    trainer.project_name=rollout_allocation
    trainer.experiment_name="${recipe}_$NAME"
    trainer.default_local_dir="$CHECKPOINT_DIR/${recipe}_$NAME"
  )
  # Later settings win; hydra wants its own flags after all of them.
  exec "$PYTHON" -m "recipe.$recipe" "${common[@]}" "${SETTINGS[@]}" "${overrides[@]}" "${flags[@]}"
}

train_method() {  # train_method <recipe> <the user's arguments>...: with RECIPE=grpo, the uniform baseline instead
  local method=$1
  shift
  case ${RECIPE:-$method} in
    "$method") train "$method" "${METHOD[@]}" "$@" ;;
    grpo) train grpo "$@" ;;
    *) echo "error: RECIPE=$RECIPE is not valid; use $method, or grpo for the baseline" >&2; exit 2 ;;
  esac
}
