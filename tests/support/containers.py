"""A stand-in for docker that starts processes, and real containers where a runtime can start them."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from verl_ext.sandbox.containers import Limits

IMAGE = "localhost/verl-ext-test:1"
PROGRAMS = (
    "base64 bash cat chmod cp dd env head id kill ln ls mkdir mkfifo mv nproc od rm seq setsid sh sleep stat tail tee "
    "timeout touch true wc"
)
# Podman raises a user's number of processes, which needs a capability that the machine of the tests may lack.
PROCESSES = ["--ulimit", "nproc=4096:4096"]
DOCKER = """#!/bin/bash
# docker pull | image inspect | run | exec | inspect | kill | rm, as verl_ext/sandbox/containers.py calls them
state={state}
{{ printf '%s\\0' "$@"; printf '\\0'; }} >> "$state/calls"
[[ ! -e $state/hangs ]] || exec sleep 600
[[ ! -e $state/lost ]] || {{ echo "dial unix /var/run/docker.sock: connect: no such file or directory" >&2; exit 1; }}
lives() {{
  [[ -e $state/containers/$1 ]] && [[ "$(cat "/proc/$(< "$state/containers/$1")/stat" 2>&1)" == *") "[RSD]* ]]
}}
end_programs() {{  # every process of the container's sessions, also in process groups of its own
  local session stat line
  for session in $(cat "$state/programs.$1" 2> /dev/null); do
    for stat in /proc/[0-9]*/stat; do
      IFS= read -r line 2> /dev/null < "$stat" || continue
      line=(${{line##*) }})
      [[ ${{line[3]}} != "$session" ]] || kill -s KILL "${{stat//[!0-9]/}}" 2> /dev/null
    done
  done
}}
last=${{@: -1}}
case $1 in
  image)
    [[ $last != far/* || -e $state/pulled ]] || {{ echo "Error: No such image: $last" >&2; exit 1; }}
    echo "<|{folder}>" ;;
  pull)
    [[ $last != far/no* ]] || {{ echo "Error response from daemon: manifest unknown" >&2; exit 1; }}
    touch "$state/pulled" ;;
  run)
    [[ ! -e $state/broken ]] || {{ echo "docker: Error response from daemon: no space left" >&2; exit 125; }}
    [[ ! -e $state/warns ]] || echo "WARNING: $(< "$state/warns")" >&2
    while [[ $1 != --name ]]; do shift; done
    setsid sleep 600 > /dev/null 2>&1 < /dev/null &
    echo $! > "$state/containers/$2"
    echo 0123456789abcdef ;;
  exec)
    shift
    [[ $1 != --interactive ]] || shift
    folder=$4 name=$5
    shift 5
    lives "$name" || {{ echo "Error response from daemon: No such container: $name" >&2; exit 1; }}
    cd "$folder" || exit 126
    if [[ $last == "$name" ]]; then  # every process of the container
      end_programs "$name"
      [[ -e $state/deaf ]] || echo "${{@: -2:1}}"
      exit 0
    fi
    if [[ -e $state/refuses ]]; then read -r status words < "$state/refuses"; echo "$words" >&2; exit "$status"; fi
    exec setsid --wait bash -c 'echo $$ >> "$0"; exec "$@"' "$state/programs.$name" "$@" ;;
  inspect)
    if [[ " $* " == *" --size "* ]]; then
      if [[ -e $state/slow ]] && {{ (($# > 7)) || [[ $last == "$(< "$state/slow")" ]]; }}; then exec sleep 600; fi
      for name in "$state"/containers/*; do echo "</${{name##*/}} $(cat "$state/size" 2> /dev/null || echo 0)>"; done
      for name in "${{@:7}}"; do lives "$name" || {{ echo "Error: No such object: $name" >&2; exit 1; }}; done
    else
      lives "$last" || {{ echo "Error: No such object: $last" >&2; exit 1; }}
      echo "<true>"
    fi ;;
  kill)
    lives "$last" || {{ echo "Error response from daemon: No such container: $last" >&2; exit 1; }}
    end_programs "$last"
    kill -s KILL "$(< "$state/containers/$last")" ;;
  rm) ;;
  *) exit 1 ;;
esac
"""


class Docker:
    """docker's command line with a process for a container. Put ``path`` into ``PATH``.

    Args:
        folder: for the stand-in and its notes; programs of a container start in ``folder / "home"``.
    """

    def __init__(self, folder: Path):
        self.state, self.home, programs = folder / "state", folder / "home", folder / "programs"
        for each in (self.state, self.home, programs, self.state / "containers"):
            each.mkdir()
        (programs / "docker").write_text(DOCKER.format(state=self.state, folder=self.home))
        (programs / "docker").chmod(0o755)
        self.path = f"{programs}:{os.environ['PATH']}"

    def does(self, what: str, content: str = "") -> None:
        """From now on, the stand-in is ``broken``, ``hangs``, ``lost``, ``warns``, ``refuses``, says a ``size``, or is
        ``deaf`` or ``slow``.

        The content is the warning, or the exit code and the words of a refusal to start a program. A deaf stand-in does
        not answer that all processes have been ended. A slow stand-in gives no sizes of several containers, and none of
        the container whose name is the content.
        """
        (self.state / what).write_text(content)

    def calls(self, *verb: str) -> list[list[str]]:
        """The arguments of each call so far that begins with these words."""
        calls = [call.split("\0") for call in (self.state / "calls").read_text().split("\0\0")[:-1]]
        return [call for call in calls if call[: len(verb)] == list(verb)]

    def containers(self) -> list[int]:
        """The process ids of all containers ever started."""
        return [int(path.read_text()) for path in (self.state / "containers").iterdir()]


def real(**changes: object) -> Limits:
    """Limits of a real container, each low enough to be met in a test."""
    limits = {"runtime": container_runtime(), "pull": "never", "memory": 128 << 20, "cpus": 1.0, "pids": 64}
    return Limits(**limits | {"largest_file": 8 << 20, "open_files": 128, "arguments": tuple(PROCESSES)} | changes)


@cache
def container_runtime() -> str | None:
    """``docker`` or ``podman`` if this machine can start a container with all limits, else None."""
    return next((runtime for runtime in ("podman", "docker") if _works(runtime)), None)


def _works(runtime: str) -> bool:
    name = f"verl-ext-probe-{os.getpid()}"
    limits = ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--memory", "64m"]
    limits += [
        "--memory-swap",
        "64m",
        "--cpus",
        "1",
        "--pids-limit",
        "32",
        "--ulimit",
        "fsize=4096:4096",
        "--ulimit",
        "nofile=64:64",
    ]
    limits += [*PROCESSES, "--user", "64321:64321", "--workdir", "/", "--log-driver", "none", "--pull", "never"]
    seen = "ulimit -f; while read -r key value; do [[ $key != CapEff: ]] || echo $value; done < /proc/self/status"
    try:
        _build(runtime)
        _ask(
            runtime, "run", "--detach", "--rm", "--name", name, *limits, "--entrypoint", "bash", IMAGE, "-c", "sleep 60"
        )
        return _ask(runtime, "exec", "--user", "0", name, "bash", "-c", seen).split() == ["4", "0" * 16]
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        try:
            subprocess.run([runtime, "kill", name], capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            pass


def _build(runtime: str) -> None:
    """An image made of this machine's own programs: no registry is reached."""
    script = r"""
root=$(mktemp -d) && trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{tmp,proc,sys,dev,etc,root} && chmod 1777 "$root/tmp"
copy() { [[ -e $root$1 ]] || install -D "$(readlink -f "$1")" "$root$1"; }
for name in "${@:3}"; do
  file=$(type -P "$name") && copy "$file"
  [[ $file == /bin/* ]] || copy "/bin/$name" 2> /dev/null || { mkdir -p "$root/bin"; cp "$file" "$root/bin/$name"; }
  for library in $(ldd "$(readlink -f "$file")" | grep -o '/[^ ]*'); do copy "$library"; done
done
tar --owner 0 --group 0 -C "$root" -c . | "$1" import - "$2"
"""
    if subprocess.run([runtime, "image", "inspect", IMAGE], capture_output=True, timeout=60).returncode != 0:
        command = ["bash", "-c", script, "bash", runtime, IMAGE, *PROGRAMS.split()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def _ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
