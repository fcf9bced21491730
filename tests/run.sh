#!/usr/bin/env bash
# Sets up the environment and runs every test. Arguments go to pytest: bash tests/run.sh -k pilot_commit
set -euo pipefail
cd "$(dirname "$0")/.."

install_slurm() {  # for tests/examples/test_slurm.py; without it those tests are skipped, and say so
  ! command -v sbatch >/dev/null || return 0
  [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 0
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    munge slurm-client slurmctld slurmd; } >/dev/null 2>&1 || echo "Slurm could not be installed" >&2
}

bash examples/install_cpu.sh
install_slurm
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Two at a time: starting Ray, vLLM and FSDP is mostly waiting for one process after another.
.venv/bin/python -m pytest --numprocesses=2 --dist=worksteal --durations=10 "$@"
