# Sourced by prefix_ace_reason_math.sh and prefix_swe.sh: what the settings of the Prefix Sampling paper have in common
# (section 3.1 and Appendix C) beside the recipe's own defaults, and the choice of the baseline.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

GPUS_PER_NODE=${GPUS_PER_NODE:-8}

COMMON=(
  data.max_prompt_length="$PROMPT"
  data.max_response_length="$RESPONSE"

  actor_rollout_ref.actor.ppo_mini_batch_size=64                # micro-batches: by tokens, 1 response in the paper
  actor_rollout_ref.actor.optim.lr=1e-6                         # lost in the text we have; DeepSWE's
  algorithm.use_kl_in_reward=false

  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.temperature=1.0
  actor_rollout_ref.rollout.top_p=1.0                           # ours
  actor_rollout_ref.rollout.max_model_len=$((PROMPT + RESPONSE))   # ours: no more than is used
  actor_rollout_ref.rollout.val_kwargs.do_sample=true
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0          # ours
  actor_rollout_ref.rollout.val_kwargs.n=8

  trainer.test_freq=10
)

train_prefix_sampling() {  # train_prefix_sampling <the user's arguments>...: with BASELINE=1, without prefixes
  if [[ ${RECIPE:-prefix_sampling} != prefix_sampling ]]; then
    echo "error: RECIPE=$RECIPE is not valid; the baseline is this recipe without prefixes, use BASELINE=1" >&2
    exit 2
  fi
  case ${BASELINE:-0} in
    0) train prefix_sampling "$@" ;;
    1) NAME=baseline_$NAME; train prefix_sampling rollout_policy.use_prefixes=false "$@" ;;
    *) echo "error: BASELINE=$BASELINE is not valid; use 1 for the matched baseline, or 0" >&2; exit 2 ;;
  esac
}
