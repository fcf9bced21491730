#!/usr/bin/env bash
# Sets up the environment and runs every test. Arguments go to pytest: bash tests/run.sh -k pilot_commit
set -euo pipefail
cd "$(dirname "$0")/.."
bash examples/install_cpu.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# The fast tests first; the rest starts the real stack, one training run at a time.
.venv/bin/python -m pytest --durations=10 "$@"
