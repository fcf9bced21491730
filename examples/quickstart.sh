#!/usr/bin/env bash
# From nothing to a comparison of GRPO and Pilot-Commit, on a machine without a GPU: installs, builds tasks, warm-starts
# a small model, trains both on the same number of rollouts, and shows a table and a plot.
#
#   bash examples/quickstart.sh                   4 to 11 minutes on two cores
#   MODEL=smollm2 bash examples/quickstart.sh     a few steps of a real pretrained model, SmolLM2-135M-Instruct
#   MODEL=agent bash examples/quickstart.sh       an agent with an SQLite tool: Prefix Sampling and its baseline
#
# A second run skips finished parts. OUT=folder sets the output folder; BUDGET=rollouts sets the length of training.
# SEEDS="1 2 3" trains every method with three seeds of the data's order, so that the result has an interval. On a
# machine with two cores and 5 GB of memory for each run, runs train at the same time; AT_ONCE=1 prevents this.
set -euo pipefail
refuse() { echo "error: $1" >&2; exit 2; }
(($# == 0)) ||
  refuse "$1 is not valid: quickstart.sh takes no arguments, set MODEL, OUT, BUDGET or SEEDS before bash"
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL=${MODEL:-small}
OUT=${OUT:-outputs/quickstart_$MODEL}
case $MODEL in
  small)
    BUDGET=${BUDGET:-4608}
    METHODS=(grpo pilot_commit)
    TASK=(reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym
      data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4
      actor_rollout_ref.actor.optim.lr=5e-5 trainer.test_freq=2
      data.max_prompt_length=32 data.max_response_length=16 actor_rollout_ref.rollout.max_model_len=64
      actor_rollout_ref.rollout.val_kwargs.n=1)
    ;;
  smollm2)
    BUDGET=${BUDGET:-336}
    METHODS=(pilot_commit)
    TASK=(reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym
      data.train_batch_size=2 actor_rollout_ref.actor.ppo_mini_batch_size=2
      actor_rollout_ref.actor.optim.lr=1e-6 trainer.test_freq=2
      data.max_prompt_length=160 data.max_response_length=48 actor_rollout_ref.rollout.max_model_len=256
      actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.rollout.temperature=0.7
      +reward.custom_reward_function.reward_kwargs.extract=number)   # the model answers in sentences
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} # the matrices of this model are large enough for two threads
    AT_ONCE=${AT_ONCE:-1}  # the memory of its runs has not been measured
    ;;
  agent)
    BUDGET=${BUDGET:-5120}
    METHODS=(baseline prefix_sampling)
    TASK=(reward.custom_reward_function.path=pkg://verl_ext.data.sql_tasks
      data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=16
      actor_rollout_ref.actor.optim.lr=1e-4 trainer.test_freq=10
      data.max_prompt_length=96 data.max_response_length=128 actor_rollout_ref.rollout.max_model_len=224
      actor_rollout_ref.rollout.val_kwargs.n=1
      actor_rollout_ref.rollout.multi_turn.enable=true)
    ;;
  *) refuse "MODEL=$MODEL is not valid: use small, smollm2 or agent" ;;
esac
[[ $BUDGET =~ ^[1-9][0-9]*$ ]] || refuse "BUDGET=$BUDGET is not valid: use a number of rollouts"
SEEDS=${SEEDS:-1}
[[ $SEEDS =~ ^[1-9][0-9]*( [1-9][0-9]*)*$ && -z $(tr ' ' '\n' <<<"$SEEDS" | sort | uniq -d) ]] ||
  refuse "SEEDS=$SEEDS is not valid: use different numbers from 1 on, such as '1 2 3'"
AT_ONCE=${AT_ONCE:-}  # empty: train.py decides
[[ $AT_ONCE =~ ^([1-9][0-9]*)?$ ]] || refuse "AT_ONCE=$AT_ONCE is not valid: use a number of runs"

# Packages are compiled on first use: once for all processes, and without warnings about their sources.
export PYTHONDONTWRITEBYTECODE= PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::SyntaxWarning}
bash examples/install_cpu.sh
source .venv/bin/activate
mkdir -p "$OUT"
OUT=$(CDPATH= cd "$OUT" && pwd)  # in overrides it has quotes of its own, for characters with a meaning in hydra
[[ $MODEL != agent ]] || TASK+=(actor_rollout_ref.rollout.multi_turn.tool_config_path="\"$OUT/data/tools.yaml\"")
# 128 MiB, enough for 256 sequences of the two models that are made here: vLLM first fills the cache with zeros.
[[ $MODEL == smollm2 ]] || TASK+=(actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=134217728)

followed() {  # followed <name> <command>...: shows the command's last line and its seconds; all output is in $OUT/<name>.log
  local name=$1
  shift
  if ! COLUMNS=200 "$@" 2>&1 | tee "$OUT/$name.log" | python examples/quickstart/follow.py "$name"; then
    echo "error: $name failed; the end of $OUT/$name.log:" >&2
    tail -n 20 "$OUT/$name.log" >&2
    exit 1
  fi
}

prepare() {
  local data=()
  case $MODEL in
    agent) data=(sql_tasks) ;;
    small) # words to spell backward, few of them learnable; validation, sampled once each, on words of 8 and 9 letters
      data=(reasoning_gym --validation 512)
      for level in 3@8/0 4@8/0 5@8/0 6@8/0 7@6/0 8@7/1 9@20/1 10@35/0; do # letters@share of prompts/of validation
        data+=(--level "spell_backward:min_word_len=${level%@*},max_word_len=${level%@*}@${level#*@}")
      done
      ;;
    smollm2) data=(reasoning_gym --level chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1
      --train 96 --validation 32) ;;
  esac
  [[ -f $OUT/data/validation.parquet ]] || followed data python -m verl_ext data "${data[@]}" --out "$OUT/data"
  [[ ! -f $OUT/model/config.json ]] || return 0
  case $MODEL in
    agent) followed model python examples/quickstart/warm_start_agent.py --data "$OUT/data" --out "$OUT/model" ;;
    small) # knows short words, half of those of 9 letters, and hardly any of 10
      # Two threads need three quarters of the time, and make the same model. Passive, they stall each other less.
      OMP_WAIT_POLICY=PASSIVE followed model python examples/quickstart/warm_start.py --data "$OUT/data" \
        --out "$OUT/model" --steps 500 --examples 20,20,20,6,2,0.5,0.04,0 --silent 1 --threads $(($(nproc) > 1 ? 2 : 1))
      ;;
    smollm2) followed model python examples/quickstart/smollm2.py --out "$OUT/model" ;;
  esac
}

method_of() {  # method_of <method>: its recipe and overrides; all runs of a model have the same rollouts per prompt
  case $MODEL/$1 in
    small/grpo) METHOD=(grpo actor_rollout_ref.rollout.n=64) ;;
    small/pilot_commit)
      METHOD=(pilot_commit rollout_policy.n_pilot=4 rollout_policy.n_commit=60 rollout_policy.s=6
        rollout_policy.max_rounds=20 rollout_policy.p_lower=0.25 rollout_policy.p_upper=0.75)
      ;;
    smollm2/pilot_commit) METHOD=(pilot_commit rollout_policy.n_pilot=8 rollout_policy.n_commit=8) ;;
    agent/prefix_sampling) METHOD=(prefix_sampling) ;;
    agent/baseline) METHOD=(prefix_sampling rollout_policy.use_prefixes=false) ;;
  esac
}

RUNS=() METRICS=()
# On a CPU, engine and actor compute the same log-probabilities, up to 5e-6. With bypass_mode they are computed once.
add_run() {  # add_run <method> <seed>: its name and command to RUNS, for train.py, and the file of its metrics to METRICS
  local run=$1
  (($2 == 1)) || run=$1_$2
  METRICS+=("$OUT/$run.jsonl")
  method_of "$1"
  RUNS+=("$run" env COLUMNS=200 VERL_FILE_LOGGER_PATH="$OUT/$run.jsonl" python -m "recipe.${METHOD[0]}" hardware=cpu
    data.train_files="\"$OUT/data/train.parquet\"" data.val_files="\"$OUT/data/validation.parquet\""
    actor_rollout_ref.model.path="\"$OUT/model\""
    actor_rollout_ref.rollout.val_kwargs.do_sample=true actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    algorithm.rollout_correction.bypass_mode=true "${TASK[@]}" "${METHOD[@]:1}"
    data.seed="$2" rollout_driver.rollout_budget="$BUDGET" trainer.total_training_steps=10000
    trainer.logger=[file] trainer.resume_mode=disable trainer.save_freq=-1
    trainer.default_local_dir="\"$OUT/checkpoints/$run\"" :::)
}

prepare
for seed in $SEEDS; do
  for method in "${METHODS[@]}"; do add_run "$method" "$seed"; done
done
echo
python examples/quickstart/train.py "$OUT" "$AT_ONCE" "${RUNS[@]}"
echo
python -m verl_ext report "${METRICS[@]}" --out "$OUT"
[[ $SEEDS == *" "* ]] || echo "One seed cannot tell methods apart; docs/comparison.md has many, with every method tuned."
