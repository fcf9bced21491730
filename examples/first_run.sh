#!/usr/bin/env bash
# What works on this machine or cluster? Checks the nodes, then trains every recipe for three steps in every trainer mode,
# stopped by SIGUSR1 and resumed, and writes one table: docs/cluster.md. Started again, it goes on with what is lacking.
#   bash examples/first_run.sh                                        the GPUs of this machine
#   HARDWARE=cpu bash examples/first_run.sh --recipes grpo            one recipe, without GPUs
#   sbatch --nodes=2 examples/slurm/train.sbatch examples/first_run.sh    two nodes
# NNODES, GPUS_PER_NODE and MODEL_PATH as for the launch scripts (examples/train.sh); OUT is the folder of the results
# (outputs/first_run), which all nodes must see. RAY_ADDRESS is the Ray cluster to join: then start this script in the root of the
# checkout. --help lists the options.
set -euo pipefail
here=$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}    # this checkout, whichever version is installed
PYTHON=${PYTHON:-python}
type -P "$PYTHON" >/dev/null ||
  { echo "error: PYTHON=$PYTHON is not valid: it cannot be started; activate the environment, or set PYTHON" >&2; exit 2; }
exec "$PYTHON" -m verl_ext first_run "$@"
