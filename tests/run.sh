#!/usr/bin/env bash
# Sets up the environment and runs every test. Arguments go to pytest: bash tests/run.sh -k pilot_commit
set -euo pipefail
cd "$(dirname "$0")/.."
bash examples/install_cpu.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Two at a time: starting Ray, vLLM and FSDP is mostly waiting for one process after another.
.venv/bin/python -m pytest --numprocesses=2 --dist=worksteal --durations=10 "$@"
