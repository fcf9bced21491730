# Functions of install_cpu.sh and install_gpu.sh, which source this file from the project's root. They set NEEDED_GB, and
# MINORS, the Python versions 3.x for which there are packages, the preferred one first.
UV=0.13.8
VENV=$(pwd -P)/.venv
LOG=$VENV/install.log

refuse() { echo "error: $1" >&2; exit 2; }

pythons() { printf '3.%s\n' $MINORS | paste -sd'|' | sed 's/|/ or /g'; }

supported() { "$1" -c "import sys; sys.exit(str(sys.version_info[1]) not in '$MINORS'.split())" 2>/dev/null; }

python_of_a_supported_version() {  # python_of_a_supported_version <stack>
  local candidate found minor candidates=(python3)
  for minor in $MINORS; do candidates+=("python3.$minor"); done
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if supported "$candidate"; then echo "$candidate"; return; fi
  done
  found=$("${PYTHON:-python3}" --version 2>&1 | head -1) || found="none"
  [[ -z ${PYTHON:-} || $found != none ]] ||
    refuse "PYTHON=$PYTHON cannot be started; name Python $(pythons) in its place, or leave PYTHON out."
  refuse "$1 needs Python $(pythons) (found: $found); install one of them or name it with PYTHON=/path/to/python."
}

check_machine() {  # check_machine <stack>
  [[ $(uname -sm) == "Linux x86_64" ]] || refuse "$1 is built for Linux x86_64, and this is $(uname -sm)."
  local free_gb
  free_gb=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1024 / 1024))
  ((free_gb >= NEEDED_GB)) || refuse "installing needs about $NEEDED_GB GB of disk, and $PWD has $free_gb GB free."
}

compiles() {  # whether the environment's Python can build a package that has no wheel
  "$VENV/bin/python" -c 'import os, shlex, shutil, sys, sysconfig
compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
sys.exit(not shutil.which(compiler) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

make_environment() {  # make_environment <stack>
  if [[ -e $VENV/bin/activate ]]; then  # the last file that venv writes
    [[ ! -f $VENV/.stack || $(<"$VENV/.stack") == "$1" ]] ||
      refuse "$VENV holds $(<"$VENV/.stack"), and both would overwrite each other: install $1 in another copy of the project, or remove that folder."
    supported "$VENV/bin/python" ||
      refuse "$VENV holds $("$VENV/bin/python" --version 2>&1), and $1 needs Python $(pythons): remove that folder."
    [[ ! -L $VENV ]] || refuse "$VENV is a link to an environment of another place: remove the link."
    grep -qF "$VENV" "$VENV/bin/activate" ||
      refuse "$VENV was made in another folder, and an environment cannot be moved: remove it."
  else
    local python
    python=$(python_of_a_supported_version "$1")
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      refuse "$python cannot make virtual environments; install its venv module (on Debian: apt-get install python3-venv)."
    "$python" -m venv "$VENV"
  fi
  compiles || refuse "pycosat, which reasoning-gym needs, is compiled while it is installed: install a C compiler and Python's headers (on Debian: apt-get install gcc python3-dev)."
  rm -f "$VENV/.install"
  echo "$1" >"$VENV/.stack"
  : >"$LOG"
  echo "Installing into $VENV"
  phase "installer (uv $UV)" "$VENV/bin/python" -m pip install "uv==$UV"
}

phase() {  # phase <description> <command>...: shows the command's last line and its seconds; all output goes to the log
  local what=$1
  shift
  if ! "$@" 2>&1 | tee -a "$LOG" | "$VENV/bin/python" examples/quickstart/follow.py "$what"; then
    tail -n 15 "$LOG" >&2
    echo "error: '$what' failed; all of its output is in $LOG." >&2
    exit 1
  fi
}

uv_install() { "$VENV/bin/python" -m uv pip install --python "$VENV/bin/python" --no-deps "$@"; }

# An environment holds absolute paths, so it must have been made where it is.
is_installed() { [[ -f $VENV/.install && $(<"$VENV/.install") == "$1 $VENV" ]]; }   # is_installed <fingerprint>

installed() {  # installed <fingerprint>
  echo "$1 $VENV" >"$VENV/.install"
  echo "Done in $SECONDS s. Activate it with: source ${VENV}/bin/activate"
}
