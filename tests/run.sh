#!/usr/bin/env bash
# Sets up the environment and runs every test. Arguments go to pytest: bash tests/run.sh -k pilot_commit
# Tests that failed run a second time, alone; the exit code is the second run's.
set -euo pipefail
CDPATH= cd "$(dirname "$0")/.."

# install_packages <command> <purpose> <package>...: apt-get install, if the command is missing and the user is root
install_packages() {
  if command -v "$1" >/dev/null || [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then return; fi
  echo "Installing ${*:3} with apt-get, for $2."
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${@:3}"; } \
    >/dev/null 2>&1 || echo "$1 could not be installed: the tests that need it will fail, and say so." >&2
}

install_packages chromium "the tests of the report's pages" chromium
install_packages sbatch "the tests of examples/slurm" munge slurm-client slurmctld slurmd
bash examples/install_cpu.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Written byte code: without it, each of some 200 processes compiles the project's modules anew, 1 to 6 s.
export PYTHONDONTWRITEBYTECODE=
# One more test at a time than there are cores, since tests of the stack also wait; and 5 GB of memory for each: a training
# needs over 4.
processes=$(nproc)
[[ " $* " == *"not stack"* ]] || ((processes += 1))
room=$(awk '/MemAvailable/ { print int($2 / 5e6) }' /proc/meminfo)
((processes <= room)) || processes=$((room > 0 ? room : 1))
status=0
.venv/bin/python -m pytest --numprocesses="$processes" --dist=worksteal --durations=10 "$@" || status=$?
((status == 1)) || exit "$status"
echo "Tests failed, see above. They run once more, each alone: a test that fails again is broken, and a test that passes now
depends on the machine's load, which is worth an issue." >&2
.venv/bin/python -m pytest --numprocesses=0 --last-failed "$@"
