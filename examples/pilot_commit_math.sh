# Sourced by run_{pilot_commit,grpo,dapo}_*.sh: everything these have in common, so that methods differ in nothing but the
# method. The settings are those of the Pilot-Commit paper (section 4) unless a comment says otherwise. The scripts set
# AMPLE, DATA, RESPONSE and STEPS.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# From the environment, with these defaults; the scripts add MODEL_PATH:
N=${N:-$AMPLE}                                   # rollouts of a prompt that is trained on: ample, or 16
NNODES=${NNODES:-8}                              # 64 GPUs for 14B; for the others: ours
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
HARDWARE=${HARDWARE:-h200}
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/$DATA.parquet}
# The benchmarks that the paper averages over 32 samples; verl takes one number of samples for all of them.
VAL_FILES=${VAL_FILES:-[$DATA_DIR/aime24.parquet,$DATA_DIR/aime25.parquet,$DATA_DIR/amc23.parquet]}

case $N in                                       # section 4.3
  128) N_PILOT=32 ;;
  64) N_PILOT=16 ;;
  16) N_PILOT=8 ;;
  *) echo "error: N=$N is not valid; use 128, 64 or 16, the paper's" >&2; exit 2 ;;
esac

NAME=$MODEL_NAME
if [[ $N != "$AMPLE" ]]; then NAME+=_n$N; fi
SETTINGS=(
  data.train_batch_size=128
  data.max_prompt_length=1024              # ours, the paper does not say
  data.max_response_length="$RESPONSE"

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

  trainer.total_training_steps="$STEPS"
  trainer.test_freq=5
)
PILOT_COMMIT=(
  rollout_policy.n_pilot="$N_PILOT"
  rollout_policy.n_commit=$((N - N_PILOT))
  rollout_policy.s=3
  rollout_policy.p_lower=0.125
  rollout_policy.p_upper=0.75
  rollout_policy.p_solve=1.0
  rollout_policy.max_delay=4
)
GRPO=(actor_rollout_ref.rollout.n="$N")
DAPO=(actor_rollout_ref.rollout.n="$N" rollout_policy.s=3)
