#!/usr/bin/env bash
# From nothing to a comparison of GRPO and Pilot-Commit, on a machine without a GPU: installs, builds tasks, warm-starts
# a small model, trains both on the same number of rollouts, and shows a table and a plot.
#
#   bash examples/quickstart.sh                   some twenty minutes on two cores
#   MODEL=smollm2 bash examples/quickstart.sh     a few steps of a real pretrained model, SmolLM2-135M-Instruct
#
# A second run skips what is there. OUT=folder keeps several apart; BUDGET=rollouts trains for shorter or longer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL=${MODEL:-small}
OUT=${OUT:-outputs/quickstart_$MODEL}
case $MODEL in
  small)
    BUDGET=${BUDGET:-9216}
    RECIPES=(grpo pilot_commit)
    METHOD=(data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=16
      actor_rollout_ref.actor.optim.lr=1e-4 trainer.test_freq=5
      data.max_prompt_length=32 data.max_response_length=16 actor_rollout_ref.rollout.max_model_len=64
      actor_rollout_ref.rollout.val_kwargs.n=3)
    N_PILOT=4 N_COMMIT=12
    ;;
  smollm2)
    BUDGET=${BUDGET:-336}
    RECIPES=(pilot_commit)
    METHOD=(data.train_batch_size=2 actor_rollout_ref.actor.ppo_mini_batch_size=2
      actor_rollout_ref.actor.optim.lr=1e-6 trainer.test_freq=2
      data.max_prompt_length=160 data.max_response_length=48 actor_rollout_ref.rollout.max_model_len=256
      actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.rollout.temperature=0.7
      +reward.custom_reward_function.reward_kwargs.extract=number)   # it answers in sentences
    N_PILOT=8 N_COMMIT=8
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} # its matrices are large enough for two
    ;;
  *) echo "error: MODEL=$MODEL is not known; use small or smollm2" >&2; exit 2 ;;
esac
[[ $BUDGET =~ ^[1-9][0-9]*$ ]] || { echo "error: BUDGET=$BUDGET is not valid; use a number of rollouts" >&2; exit 2; }

bash examples/install_cpu.sh
source .venv/bin/activate
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)

export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::SyntaxWarning} # of packages that are compiled on first use
prepare() {
  if [[ $MODEL == small ]]; then
    [[ -f $OUT/data/validation.parquet ]] || python -m verl_ext.data.reasoning_gym --out "$OUT/data"
    [[ -f $OUT/model/config.json ]] || python examples/quickstart/warm_start.py --data "$OUT/data" --out "$OUT/model"
  else
    [[ -f $OUT/data/validation.parquet ]] || python -m verl_ext.data.reasoning_gym --out "$OUT/data" \
      --level chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1 --train 96 --validation 32
    python examples/quickstart/smollm2.py --out "$OUT/model"
  fi
}

train() {  # train <recipe>: its metrics in $OUT/<recipe>.jsonl, its log beside it, its step lines here
  local recipe=$1 log=$OUT/$1.log metrics=$OUT/$1.jsonl start=$SECONDS
  if [[ -f $OUT/$recipe.done && $(<"$OUT/$recipe.done") == "$BUDGET" ]]; then
    echo "$recipe: trained before ($metrics)"
    return
  fi
  echo
  echo "$recipe: starting Ray, vLLM and FSDP, which takes about a minute (log: $log)"
  local method=(actor_rollout_ref.rollout.n=$((N_PILOT + N_COMMIT)))
  [[ $recipe != pilot_commit ]] || method=(rollout_policy.n_pilot=$N_PILOT rollout_policy.n_commit=$N_COMMIT)
  if ! VERL_FILE_LOGGER_PATH=$metrics python -m "recipe.$recipe" hardware=cpu \
    data.train_files="$OUT/data/train.parquet" data.val_files="$OUT/data/validation.parquet" \
    actor_rollout_ref.model.path="$OUT/model" \
    reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    "${METHOD[@]}" "${method[@]}" \
    rollout_driver.rollout_budget="$BUDGET" trainer.total_training_steps=10000 \
    trainer.logger=[file] trainer.resume_mode=disable trainer.save_freq=-1 \
    trainer.default_local_dir="$OUT/checkpoints/$recipe" 2>&1 |
    tee "$log" | grep --line-buffered -oE 'step [0-9/]+ (\||trains on|is the last).*|^error: .*|[A-Za-z.]+Error: .*'; then
    echo "error: training $recipe failed; the end of its log:" >&2
    tail -n 20 "$log" >&2
    exit 1
  fi
  echo "$BUDGET" >"$OUT/$recipe.done"
  echo "$recipe: done in $((SECONDS - start)) s"
}

prepare
files=()
for recipe in "${RECIPES[@]}"; do
  train "$recipe"
  files+=("$OUT/$recipe.jsonl")
done
echo
python examples/quickstart/compare.py "${files[@]}" --out "$OUT"
