# Sourced by run_hora_*.sh: everything the models have in common. The settings are those of the HORA paper (Appendix C,
# tables 3 to 5, and section 4) unless a comment says otherwise. The runs of the paper were made with TRL.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# From the environment, with these defaults; the scripts add MODEL_PATH and GPUS_PER_NODE:
ESTIMATOR=${ESTIMATOR:-grpo}                     # grpo, or rloo (section 4.1 and table 6)
NNODES=${NNODES:-1}
HARDWARE=${HARDWARE:-a800}                       # the paper has A100s and does not say of which size
# The prompts have to ask for <think>...</think><answer>...</answer>, which the reward checks: docs/data.md.
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/math12k_think_answer.parquet}
if [[ -z ${VAL_FILES:-} ]]; then
  printf -v VAL_FILES ",$DATA_DIR/%s_think_answer.parquet" math500 amc23 aime24 aime25
  VAL_FILES=[${VAL_FILES#,}]
fi

case $ESTIMATOR in
  grpo | rloo) ;;
  *) echo "error: ESTIMATOR=$ESTIMATOR is not valid; use grpo or rloo" >&2; exit 2 ;;
esac

OPTIMIZER=(                                      # FSDP2's
  actor_rollout_ref.actor.optim.lr_scheduler_type=cosine        # ours: linear in the paper, which verl does not have here
  actor_rollout_ref.actor.grad_clip=1.0
)
case " $* " in *" model_engine=megatron "*)
  OPTIMIZER=(actor_rollout_ref.actor.optim.lr_decay_style=linear actor_rollout_ref.actor.optim.clip_grad=1.0) ;;
esac

NAME=${MODEL_NAME}_math12k
if [[ $ESTIMATOR != grpo ]]; then NAME+=_$ESTIMATOR; fi
SETTINGS=(
  data.train_batch_size=60
  data.max_prompt_length=2048
  data.max_response_length=2048

  reward.custom_reward_function.path=pkg://verl_ext.data.think_answer_reward
  +reward.custom_reward_function.reward_kwargs.format_weight=0.5

  actor_rollout_ref.actor.ppo_mini_batch_size=60                # one gradient update per step
  actor_rollout_ref.actor.optim.lr=1e-6
  "${OPTIMIZER[@]}"
  actor_rollout_ref.actor.optim.weight_decay=0
  actor_rollout_ref.actor.clip_ratio_low=0.2
  actor_rollout_ref.actor.clip_ratio_high=0.2
  actor_rollout_ref.actor.entropy_coeff=0
  actor_rollout_ref.actor.use_kl_loss=false
  algorithm.use_kl_in_reward=false
  algorithm.adv_estimator="$ESTIMATOR"
  # Loss type Dr. GRPO: its length normalisation. Advantages are divided by the deviation as in section 3.1 and TRL.
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
  actor_rollout_ref.actor.loss_scale_factor=2048                # the longest response
  algorithm.rollout_correction.rollout_is=token                 # token-truncate

  actor_rollout_ref.rollout.n=32
  actor_rollout_ref.rollout.temperature=0.7
  actor_rollout_ref.rollout.top_p=1.0                           # ours
  actor_rollout_ref.rollout.val_kwargs.do_sample=true
  actor_rollout_ref.rollout.val_kwargs.temperature=0.7          # ours
  actor_rollout_ref.rollout.val_kwargs.n=8                      # ours: the paper takes 256 to 1,024 after training

  trainer.total_training_steps=200
  trainer.test_freq=20                                          # ours
)
METHOD=(
  rollout_policy.G0=8
  rollout_policy.alpha0=1.0
  rollout_policy.beta0=1.0
  rollout_policy.shards=4
  rollout_policy.warm_up_component=format
  rollout_policy.warm_up_threshold=0.85
  rollout_policy.warm_up_cycles=3
)
