# Sourced by run_vip_*.sh: everything the models have in common. The settings are those of the VIP paper (section 6 and
# Appendices C and F) unless a comment says otherwise.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# From the environment, with these defaults; the scripts add MODEL_PATH:
N=${N:-8}                                        # rollouts per prompt on average: 8 or 16
ESTIMATOR=${ESTIMATOR:-rloo}                     # rloo or dr_grpo
NNODES=${NNODES:-1}                              # ours
GPUS_PER_NODE=${GPUS_PER_NODE:-8}                # ours
HARDWARE=${HARDWARE:-h200}                       # ours
# DAPO-Math-17k with every prompt once; the hub's file holds each many times.
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/dapo_math_17k.parquet}
VAL_FILES=${VAL_FILES:-[$DATA_DIR/aime24.parquet,$DATA_DIR/aime25.parquet]}

case $ESTIMATOR in
  rloo) ADVANTAGE=(algorithm.adv_estimator=rloo) ;;
  dr_grpo) ADVANTAGE=(algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false) ;;
  *) echo "error: ESTIMATOR=$ESTIMATOR is not valid; use rloo or dr_grpo" >&2; exit 2 ;;
esac

NAME=${MODEL_NAME}_dapo_math_${ESTIMATOR}_n$N
SETTINGS=(
  data.train_batch_size=512
  data.shuffle=false                                            # a fixed order of the prompts
  data.max_prompt_length=1024                                   # ours
  data.max_response_length=10240

  reward.custom_reward_function.path=pkg://verl_ext.data.math_reward   # 0 or 1; in the paper -1 or 1

  actor_rollout_ref.actor.ppo_mini_batch_size=64                # Appendix F; table 9 has 512
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.optim.lr_warmup_steps=20
  actor_rollout_ref.actor.clip_ratio_low=0.2                    # ours, and verl's default
  actor_rollout_ref.actor.clip_ratio_high=0.2                   # ours, and verl's default
  actor_rollout_ref.actor.use_kl_loss=false
  algorithm.use_kl_in_reward=false
  "${ADVANTAGE[@]}"
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean     # section 3: 1/|o| for both estimators

  actor_rollout_ref.rollout.n="$N"
  actor_rollout_ref.rollout.temperature=1.0
  actor_rollout_ref.rollout.top_p=1.0                           # ours
  actor_rollout_ref.rollout.val_kwargs.do_sample=true
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0          # ours
  actor_rollout_ref.rollout.val_kwargs.n=32

  trainer.total_epochs=2
  trainer.test_freq=5                                           # ours
)
METHOD=(
  rollout_policy.estimator=gaussian_process
  rollout_policy.allocator=gradient_variance
  rollout_policy.gradient="$ESTIMATOR"
  rollout_policy.L=3                                            # the least that the paper allows
  rollout_policy.U=32                                           # ours
)
# Qwen2.5-Math declares 4,096 positions, fewer than the paper's responses are long, and the paper does not say how it
# went beyond: raised here for training and for vLLM.
LONGER=(
  +actor_rollout_ref.model.override_config.max_position_embeddings=11264
  +actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.max_position_embeddings=11264
)
