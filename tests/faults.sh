#!/usr/bin/env bash
# Kills training runs at random moments, resumes them, and prints each outcome. Hours on two cores; not part of CI.
#   bash tests/faults.sh --tries 50        bash tests/faults.sh --tries 2 --recipes grpo,pilot_commit
set -euo pipefail
CDPATH= cd "$(dirname "$0")/.."
PYTHONPATH=.:tests exec .venv/bin/python tests/faults/harness.py "$@"
