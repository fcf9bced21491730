#!/usr/bin/env bash
# Sets up the environment and runs every test. Arguments go to pytest: bash tests/run.sh -k pilot_commit
set -euo pipefail
cd "$(dirname "$0")/.."

# The report's pages are tested in a browser: Debian's chromium is installed where it is missing and this runs as root.
# Without it those tests are skipped, and say so.
install_chromium() {
    if command -v chromium > /dev/null || [[ $EUID -ne 0 ]] || ! command -v apt-get > /dev/null; then return; fi
    echo "Installing chromium with apt-get, for the tests of the report's pages."
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } > /dev/null ||
        echo "chromium could not be installed: the tests of the report's pages will be skipped." >&2
}

install_chromium
bash examples/install_cpu.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Two at a time: starting Ray, vLLM and FSDP is mostly waiting for one process after another.
.venv/bin/python -m pytest --numprocesses=2 --dist=worksteal --durations=10 "$@"
