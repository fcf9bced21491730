"""Settings of a shell that make its output the same on every run, so that a prefix can be replayed.

Environment variables come first, because a program that prints the same text needs no replacement. A replacement
covers dates and durations that no variable fixes. Each pattern names the place of the text, such as a line of ``ls -l``
or the last line of ``pytest``, so that dates and numbers elsewhere, for example in a file, reach the model unchanged.
Random names that the model may use in a later command are neither fixed nor replaced, but numbered
(:class:`RandomNames`).
"""

from __future__ import annotations

import re

SECONDS = (
    1767225600  # 2026-01-01 00:00 UTC: later than the last commit of the tasks' repositories, earlier than any run
)
ENVIRONMENT = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "TERM": "dumb",
    "COLUMNS": "80",
    "LINES": "24",
    "LC_ALL": "C.UTF-8",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PIP_PROGRESS_BAR": "off",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",  # pip's notice depends on the day
    "TQDM_DISABLE": "1",
    "PYTHONHASHSEED": "0",  # the order of sets
    # Python trusts a .pyc file of the same second and size as its source. A replay runs faster than the original.
    "PYTHONDONTWRITEBYTECODE": "1",
    "SOURCE_DATE_EPOCH": str(SECONDS),
    "TIME_STYLE": "+Jan  1 00:00",  # the dates of ls -l and du --time
    # The hash of a commit depends on names and dates.
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@example.com",
    "GIT_AUTHOR_DATE": f"{SECONDS} +0000",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@example.com",
    "GIT_COMMITTER_DATE": f"{SECONDS} +0000",
    "GIT_TEST_DATE_NOW": str(SECONDS),  # git's own time: "2 hours ago"
}

_SIGNALS = "Terminated|Killed|Hangup|Interrupt|Aborted|Segmentation fault|Floating point exception|Bus error|Done|Exit"
_LISTED = (
    r"[bcdlps-](?:[r-][w-][xsStT-]){3}[.+@]? +(?:\d+ \S+ +\S+|[^\s/]+/[^\s/]+) +(?:\d+, +)?[\d.]+[KMGTPE]? "  # ls, tar
)
_DURATION = r"\d+\.\d+ ?s(?:ec(?:onds?)?)?(?: \(\d+:\d\d:\d\d\))?"
REPLACEMENTS = (
    # pytest pads its last line to the width of the terminal, so the padding depends on the duration.
    (rf"(?m)^=+ (.+) in {_DURATION} =+$", r"=== \1 in 0.00s ==="),
    (rf"(?m)\bin {_DURATION}$", "in 0.00s"),  # pytest -q, unittest
    (r"(?m)^\d+\.\d\ds (call|setup|teardown) ", r"0.00s \1 "),  # pytest --durations
    (r"(?m)^(random seed: +)\d+$", r"\g<1>0"),  # SymPy's bin/test
    (r"(?m)^(real|user|sys)([ \t]+)(?:\d+m)?\d+\.\d+s?$", r"\1\g<2>0m0.000s"),  # time
    (
        r"(?m)^[\d.]+user [\d.]+system [\d:.]+elapsed .*\n.*swaps$",
        "0.00user 0.00system 0:00.00elapsed",
    ),  # /usr/bin/time
    (r"\bat 0x[0-9a-f]{6,16}\b", "at 0x0"),  # <object at 0x7f...>
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{9} [+-]\d{4}\b", "2026-01-01 00:00:00.000000000 +0000"),  # diff -u, stat
    (rf"(?m)({_LISTED})(?:[A-Z][a-z]{{2}} [ \d]\d|(?:\d{{4}}-)?\d\d-\d\d) \d\d:\d\d(?= )", r"\1Jan  1 00:00"),
    (rf"(?m)^ *\d+ +(\d+ +)?(?={_LISTED})", r"0 \1"),  # inodes: ls -i, find -ls
    (r"(?m)^(Device: )\S+(\s+Inode: )\d+ ", r"\g<1>0\g<2>0 "),  # stat
    (r"\bverl-ext-[0-9a-f]{32}\b", "verl-ext-0"),  # a program's folder on a server (sandbox/servers.py)
    (rf"(?m)^(.*: line \d+: +)\d+ (?=(?:{_SIGNALS})\b)", r"\g<1>0 "),  # bash, of a process that was killed
)

_RANDOM = (  # pattern of a random name, its numbered form, pattern of the numbered form
    (re.compile(r"(?<=/)tmp\.[A-Za-z0-9]{10}(?![A-Za-z0-9])"), "tmp.{:010d}", r"tmp\.\d{10}"),  # mktemp
    (re.compile(r"(?<=/tmp/)tmp[a-z0-9_]{8}(?![a-z0-9_])"), "tmp{:08d}", r"tmp\d{8}"),  # Python's tempfile
    # Process ids of jobs in the background, "[1] 12345". Linux has no process id above 4194304.
    (re.compile(r"(?m)(?<=^\[\d\] )\d+(?=\r?$)"), "{:d}", r"99\d{5}"),
)
FIRST_JOB = 9_900_001
MOST_NAMES = 10_000  # of a trajectory; each observation shows a few hundred at most
_JOB = re.compile(r"(?<![&>|])&(?![&>])")  # a command in the background
_NUMBERED = re.compile(rf"(?<!\w)(?:{'|'.join(numbered for _, _, numbered in _RANDOM)})(?!\w)")


class RandomNames:
    """Numbers for the random names that the commands of a trajectory have printed, counted from 1.

    The model sees ``/tmp/tmp.0000000001`` instead of ``/tmp/tmp.q8ZxFz1AbC``, on every run. If it writes the number in
    a later command, the command gets the name. Names that the model has chosen itself stay as they are, and so do names
    after the first ``MOST_NAMES``.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}  # name -> its numbered form
        self._names: dict[str, str] = {}

    def shown(self, output: str, command: str) -> str:
        """The output of this command of the model, as the model sees it."""
        for pattern, numbered, _ in _RANDOM if _JOB.search(command) else _RANDOM[:-1]:
            output = pattern.sub(lambda match, numbered=numbered: self._number(match[0], numbered), output)
        return output

    def real(self, command: str) -> str:
        """The model's command as the shell gets it."""
        for pattern, _, _ in _RANDOM:
            for name in pattern.findall(command):
                if name not in self._names:
                    self._numbers.setdefault(name, name)
        return _NUMBERED.sub(lambda match: self._names.get(match[0], match[0]), command)

    def _number(self, name: str, numbered: str) -> str:
        if name not in self._numbers:
            count = len(self._names)
            if count >= MOST_NAMES:
                return name
            number = numbered.format(count + (FIRST_JOB if name.isdigit() else 1))
            self._numbers[name], self._names[number] = number, name
        return self._numbers[name]
