#!/usr/bin/env bash
# Trains three recipes with one option of verl after another on the CPU, and prints what passed. Half an hour on two
# cores; not part of CI. A second start goes on with the cells that have not passed.
#   bash tests/matrix.sh        bash tests/matrix.sh --recipes grpo,hora --options ranks --page docs/matrix.md
set -euo pipefail
CDPATH= cd "$(dirname "$0")/.."
PYTHONPATH=.:tests exec .venv/bin/python tests/matrix/harness.py "$@"
