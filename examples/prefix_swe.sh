# Sourced by run_prefix_sampling_qwen3_{14b,32b}_swe.sh: everything the models have in common. The settings are those of
# the Prefix Sampling paper (section 3.1 and Appendix C) unless a comment says otherwise. docs/agents.md says what the
# machines need.
PROMPT=4096
source "$(dirname "${BASH_SOURCE[0]}")/prefix_sampling.sh"

# From the environment, with these defaults; the scripts set RESPONSE, TURNS and STEPS, and add MODEL_PATH:
NNODES=${NNODES:-4}                              # 32 GPUs; as 4 nodes: ours
HARDWARE=${HARDWARE:-b200}
# R2E-Gym-Subset: python -m verl_ext.data.prepare r2e_gym --out $DATA_DIR
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/r2e_gym/train.parquet}
VAL_FILES=${VAL_FILES:-$DATA_DIR/r2e_gym/validation.parquet}     # ours, held out; the paper: SWE-bench Verified
TOOLS=${TOOLS:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/swe_tools.yaml}   # where sandboxes run, and their limits

if [[ ! -f $TOOLS ]]; then
  echo "error: TOOLS=$TOOLS is not valid; name a file of tools, like examples/swe_tools.yaml" >&2
  exit 2
fi

NAME=$MODEL_NAME
SETTINGS=(
  "${COMMON[@]}"
  data.train_batch_size=64
  +data.apply_chat_template_kwargs.enable_thinking=true
  reward.custom_reward_function.path=pkg://verl_ext.data.swe_reward

  actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
  actor_rollout_ref.rollout.multi_turn.enable=true
  actor_rollout_ref.rollout.multi_turn.format=hermes            # how Qwen3 writes tool calls
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns="$TURNS"
  actor_rollout_ref.rollout.multi_turn.tool_config_path="$TOOLS"
  actor_rollout_ref.rollout.multi_turn.max_tool_response_length=16384   # ours, in characters; the tools allow less
  rollout_driver.agent_timeout=1200

  trainer.total_training_steps="$STEPS"
)
