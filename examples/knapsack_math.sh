# Sourced by run_knapsack_*.sh: everything the models have in common. The settings are those of the Knapsack-RL paper
# (section 5 and Appendices F and G) unless a comment says otherwise. The scripts set DATA and may set MINI_BATCH.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# From the environment, with these defaults; the scripts add MODEL_PATH:
N=${N:-8}                                        # rollouts per prompt on average: 8; 4 and 16 in section 5.3
ESTIMATOR=${ESTIMATOR:-grpo}                     # grpo, or reinforce_plus_plus (Appendix G, table 7)
NNODES=${NNODES:-4}                              # 32 GPUs; as 4 nodes: ours
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
HARDWARE=${HARDWARE:-a800}                       # A100-80GB for the 7B model, H20-96GB for the others
# DAPO-Math-17K: 17,917 prompts, every one once; the hub's file holds each many times.
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/$DATA.parquet}
# During training, at most 100 random samples of each benchmark.
VAL_FILES=${VAL_FILES:-[$DATA_DIR/aime24.parquet,$DATA_DIR/aime25.parquet,$DATA_DIR/amc23.parquet,$DATA_DIR/math500.parquet,$DATA_DIR/minerva.parquet,$DATA_DIR/olympiad.parquet]}
LENGTH=${LENGTH:-4096}                           # of prompt and response together

case $ESTIMATOR in
  grpo) ADVANTAGE=(algorithm.adv_estimator=grpo) ;;
  # Its form for groups: REINFORCE++ itself takes no baseline within a prompt, which the recipes need.
  reinforce_plus_plus) ADVANTAGE=(algorithm.adv_estimator=reinforce_plus_plus_baseline) ;;
  *) echo "error: ESTIMATOR=$ESTIMATOR is not valid; use grpo or reinforce_plus_plus" >&2; exit 2 ;;
esac

NAME=${MODEL_NAME}_${DATA%_17k}_knapsack
if [[ $ESTIMATOR != grpo ]]; then NAME+=_$ESTIMATOR; fi
if [[ $N != 8 ]]; then NAME+=_n$N; fi
SETTINGS=(
  data.train_batch_size=256
  data.max_prompt_length=1024                                   # ours
  data.max_response_length=$((LENGTH - 1024))

  reward.custom_reward_function.path=pkg://verl_ext.data.math_reward   # ours

  actor_rollout_ref.actor.ppo_mini_batch_size="${MINI_BATCH:-64}"   # ours: off-policy updates, not said how many
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.clip_ratio_low=0.2
  actor_rollout_ref.actor.clip_ratio_high=0.28
  actor_rollout_ref.actor.entropy_coeff=0
  actor_rollout_ref.actor.use_kl_loss=false
  algorithm.use_kl_in_reward=false
  "${ADVANTAGE[@]}"
  rollout_driver.advantage_clip=5.0                             # never reached with 8 rollouts for every prompt

  actor_rollout_ref.rollout.n="$N"
  actor_rollout_ref.rollout.temperature=1.0                     # ours
  actor_rollout_ref.rollout.top_p=1.0                           # ours
  actor_rollout_ref.rollout.val_kwargs.do_sample=true
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0          # ours
  actor_rollout_ref.rollout.val_kwargs.n=16

  trainer.total_training_steps=1000
  trainer.test_freq=10
)
METHOD=(
  rollout_policy.N_low=2
  rollout_policy.N_up=128
  rollout_policy.estimator_options.size=16
)
