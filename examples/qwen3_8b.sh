# Sourced by run_{pilot_commit,grpo,dapo}_qwen3_8b.sh: everything the three have in common, so that they differ in
# nothing but the method. The settings are those of the Pilot-Commit paper (section 4) unless a comment says otherwise.
#
# From the environment, with these defaults:
NNODES=${NNODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
HARDWARE=${HARDWARE:-h200}                       # h200, a800 or b200: docs/hardware.md
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B-Base}     # a folder, or a model's name on the hub
DATA_DIR=${DATA_DIR:-$HOME/data}
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/polaris_53k.parquet}
# The benchmarks that the paper averages over 32 samples; verl takes one number of samples for all of them.
VAL_FILES=${VAL_FILES:-[$DATA_DIR/aime24.parquet,$DATA_DIR/aime25.parquet,$DATA_DIR/amc23.parquet]}
CHECKPOINT_DIR=${CHECKPOINT_DIR:-checkpoints}    # each method gets a folder of its own in it
PYTHON=${PYTHON:-python}
#
# On several nodes, start Ray on all of them first (ray start ...) and run the script on one.

# This checkout, whichever one happens to be installed.
PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH

train() {  # train <recipe> <settings of the method>... <the user's arguments>...
  local recipe=$1 settings overrides=() flags=() argument
  shift
  for argument in "$@"; do
    case $argument in
      hardware=*) HARDWARE=${argument#*=} ;;      # hydra takes it once only
      -*) flags+=("$argument") ;;
      *=* | \~*) overrides+=("$argument") ;;
      *) flags+=("$argument") ;;                  # the value of a flag: --cfg job
    esac
  done
  settings=(
    hardware="$HARDWARE"                          # its model_size is 8b by default
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$GPUS_PER_NODE"

    data.train_files="$TRAIN_FILES"
    data.val_files="$VAL_FILES"
    data.train_batch_size=128
    data.max_prompt_length=1024              # ours, the paper does not say
    data.filter_overlong_prompts=true
    data.max_response_length=4096

    reward.custom_reward_function.path=pkg://verl_ext.data.math_reward   # math-verify; the paper has Tinker's verifier

    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.use_kl_loss=false
    algorithm.use_kl_in_reward=false

    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=0.7
    actor_rollout_ref.rollout.val_kwargs.n=32

    trainer.total_training_steps=500
    trainer.test_freq=5
    trainer.save_freq=20                     # ours
    trainer.max_actor_ckpt_to_keep=2         # ours
    trainer.resume_mode=auto
    "trainer.logger=[console,wandb]"
    trainer.project_name=rollout_allocation
    trainer.experiment_name="${recipe}_qwen3_8b"
    trainer.default_local_dir="$CHECKPOINT_DIR/${recipe}_qwen3_8b"
  )
  # Later settings win; hydra wants its own flags after all of them.
  exec "$PYTHON" -m "recipe.$recipe" "${settings[@]}" "${overrides[@]}" "${flags[@]}"
}
