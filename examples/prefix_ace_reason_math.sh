# Sourced by run_prefix_sampling_qwen3_{4b_instruct,8b}.sh: everything the models have in common. The settings are those
# of the Prefix Sampling paper (section 3.1 and Appendix C) unless a comment says otherwise.
PROMPT=2048
RESPONSE=16384
source "$(dirname "${BASH_SOURCE[0]}")/prefix_sampling.sh"

# From the environment, with these defaults; the scripts add NNODES and MODEL_PATH:
HARDWARE=${HARDWARE:-a800}
# AceReason-Math-Subset, about 15,000 problems, to be made beforehand: those of AceReason-Math that
# Qwen3-4B-Instruct-2507 solves in fewer than 75 % of 8 rollouts.
TRAIN_FILES=${TRAIN_FILES:-$DATA_DIR/ace_reason_math_subset.parquet}
VAL_FILES=${VAL_FILES:-$DATA_DIR/aime25.parquet}

NAME=${MODEL_NAME}_ace_reason_math
SETTINGS=(
  "${COMMON[@]}"
  data.train_batch_size=128
  reward.custom_reward_function.path=pkg://verl_ext.data.math_reward   # ours
  trainer.total_training_steps=300                              # ours: the baselines peak at step 230 (4B) and 260 (8B)
)
