# Sourced by run_{pilot_commit,grpo,dapo}_qwen3_8b.sh: everything the three have in common, so that they differ in
# nothing but the method. The settings are those of the Pilot-Commit paper (section 4) unless a comment says otherwise.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# From the environment, with these defaults:
NNODES=${NNODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
HARDWARE=${HARDWARE:-h200}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B-Base}
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/polaris_53k.parquet}
# The benchmarks that the paper averages over 32 samples; verl takes one number of samples for all of them.
VAL_FILES=${VAL_FILES:-[$DATA_DIR/aime24.parquet,$DATA_DIR/aime25.parquet,$DATA_DIR/amc23.parquet]}

NAME=qwen3_8b
SETTINGS=(
  data.train_batch_size=128
  data.max_prompt_length=1024              # ours, the paper does not say
  data.max_response_length=4096

  reward.custom_reward_function.path=pkg://verl_ext.data.math_reward   # math-verify; the paper has Tinker's verifier

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
)
