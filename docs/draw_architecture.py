"""Draws docs/architecture.svg from the imports of verl_ext/ and recipe/, and refuses an import that points up.

python docs/draw_architecture.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"


class Room(NamedTuple):
    """A box of the picture."""

    name: str
    modules: tuple[str, ...]  # patterns
    about: str
    x: int  # of its centre


# Floors from top to bottom; a room imports from lower floors only.
FLOORS = [
    [
        Room(
            "command line",
            ("verl_ext.cli", "verl_ext.__main__", "recipe.*.__main__"),
            "verl-ext, python -m recipe…",
            470,
        )
    ],
    [
        Room("evaluation", ("verl_ext.evaluation*",), "samples, pass@k", 470),
        Room("first run", ("verl_ext.first_run*",), "what works on a cluster", 790),
    ],
    [
        Room("lab", ("verl_ext.lab*",), "learn, simulate, waste, report", 110),
    ],
    [
        Room(
            "launch",
            (
                "verl_ext.launch",
                "verl_ext.announce",
                "verl_ext.export",
                "verl_ext.new",
                "verl_ext.template",
                "verl_ext.recipes",
                "verl_ext.config*",
            ),
            "composes the configuration",
            470,
        )
    ],
    [Room("driver", ("verl_ext.driver*",), "runs verl's trainers", 470)],
    [
        Room("data", ("verl_ext.data*",), "prompts, verifiers", 760),
        Room("sandbox", ("verl_ext.sandbox*",), "where an agent's code runs", 300),
        Room("hardware", ("verl_ext.hardware*",), "memory of a model", 540),
    ],
    [Room("testing", ("verl_ext.testing*",), "checks of any policy", 720)],
    [
        Room("recipe", ("recipe*", "verl_ext.one_wave"), "one policy per method", 230),
        Room(
            "controller",
            (
                "verl_ext.controller",
                "verl_ext.record",
                "verl_ext.ledger",
                "verl_ext.prompts",
                "verl_ext.weights",
            ),
            "executes what a policy asks for",
            580,
        ),
    ],
    [
        Room("estimation", ("verl_ext.estimation*",), "predicts success rates", 120),
        Room("allocation", ("verl_ext.allocation*",), "counts within a budget", 790),
    ],
    [
        Room(
            "protocol",
            ("verl_ext.policy", "verl_ext.sampling", "verl_ext.trajectory"),
            "Prompt, Group, Rollout, RolloutPolicy",
            470,
        )
    ],
    [
        Room(
            "basics",
            (
                "verl_ext",
                "verl_ext.checks",
                "verl_ext.errors",
                "verl_ext.extras",
                "verl_ext.files",
                "verl_ext.resolvers",
            ),
            "checks, errors, files: any room may import them; arrows left out",
            470,
        )
    ],
]
NUMPY_FLOOR = 6  # from this floor down, numpy and scipy are enough
ONLY_FROM = {"driver": {"launch"}}
HEAVY = {"verl", "ray", "torch", "vllm", "transformers", "transfer_queue", "hydra", "omegaconf"}
TARGET = re.compile(r"((?:verl_ext|recipe)(?:\.\w+)+):\w+")  # "module:function", as the command line names them

FLOOR = {room.name: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ROOMS = [room for rooms in FLOORS for room in rooms]
WIDTH, ROW, BOX = 900, 84, 48


class PointsUp(Exception):
    """Forbidden imports, one per line."""


def room_of(module: str) -> str:
    """The room of a module; the first that matches."""
    for room in ROOMS:
        if any(fnmatch(module, pattern) for pattern in room.modules):
            return room.name
    raise PointsUp(f"{module} is in no room: name it in docs/draw_architecture.py.")


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Modules that a file imports or names as a target, and whether at module level."""
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            modules = [f"verl_ext.{name}" for name in names] if node.module == "verl_ext" else [node.module]
            yield from ((module, id(node) in top) for module in modules)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (found := TARGET.fullmatch(node.value)):
            yield found[1], False


def arrows(root: Path = ROOT) -> set[tuple[str, str]]:
    """Pairs (room, imported room) of the code in ``root``.

    Raises:
        PointsUp: an import of a room on the same or a higher floor, of the driver from elsewhere than the launcher, of
            verl outside of the driver, or of a heavy package on a floor where numpy and scipy are enough.
    """
    found, faults = set(), []
    for path in sorted([*root.glob("verl_ext/**/*.py"), *root.glob("recipe/**/*.py")]):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        room = room_of(module)
        floor = FLOOR[room]
        for imported, at_module_level in imports(ast.parse(path.read_text(encoding="utf-8"))):
            package = imported.partition(".")[0]
            if package in HEAVY:
                if floor >= NUMPY_FLOOR and at_module_level:
                    faults.append(f"{module} imports {imported}, on a floor where numpy and scipy are enough")
                if package == "verl" and room != "driver":
                    faults.append(f"{module} imports {imported}; only the driver may")
            if package not in ("verl_ext", "recipe") or imported == "verl_ext.__version__":
                continue
            other = room_of(imported)
            if other == room:
                continue
            found.add((room, other))
            if FLOOR[other] <= floor or room not in ONLY_FROM.get(other, {room}):
                faults.append(f"{module} ({room}) imports {imported} ({other}): this arrow points up")
    if faults:
        raise PointsUp("\n".join(faults))
    return found


def draw() -> str:
    """The picture as SVG; the same imports between rooms give the same text."""
    drawn = sorted((a, b) for a, b in arrows() if b != "basics")
    centre = {room.name: room.x for room in ROOMS}
    half = {room.name: max(80, 4 * len(room.about)) for room in ROOMS}
    top = {name: 16 + ROW * floor for name, floor in FLOOR.items()}

    def end(name: str, others: list[str], other: str) -> float:
        """Where on a box's edge the arrow to or from ``other`` is: spread in the order of the others from the left."""
        order = sorted(others, key=lambda room: (centre[room], top[room]))
        return centre[name] + half[name] * 1.6 * ((order.index(other) + 1) / (len(order) + 1) - 0.5)

    lines, boxes = [], []
    for a, b in drawn:
        x, y = end(a, [target for source, target in drawn if source == a], b), top[a] + BOX
        u, v = end(b, [source for source, target in drawn if target == b], a), top[b] - 3
        bend = (v - y) / 2
        lines.append(f'<path d="M{x:.0f} {y} C{x:.0f} {y + bend:.0f} {u:.0f} {v - bend:.0f} {u:.0f} {v}"/>')
    for name, _, about, x in ROOMS:
        boxes += [
            f'<rect x="{x - half[name]}" y="{top[name]}" width="{2 * half[name]}" height="{BOX}" rx="6"/>',
            f'<text x="{x}" y="{top[name] + 20}" font-weight="bold">{escape(name)}</text>',
            f'<text x="{x}" y="{top[name] + 37}" font-size="12">{escape(about)}</text>',
        ]
    border = 16 + ROW * NUMPY_FLOOR - (ROW - BOX) // 2
    height = 16 + ROW * len(FLOORS)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#78909c"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<path d="M0 {border}H{WIDTH}" stroke="#c62828" stroke-dasharray="6 5"/>',
            f'<text x="{WIDTH - 160}" y="{border + 16}" font-size="12" fill="#c62828">numpy and scipy suffice</text>',
            '<g fill="none" stroke="#78909c" stroke-width="1.5" marker-end="url(#tip)">',
            *lines,
            "</g>",
            '<g font-size="15" text-anchor="middle" fill="#12263a">',
            *(box.replace("<rect", '<rect fill="#e8f1fa" stroke="#33658a"') for box in boxes),
            "</g>",
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    try:
        PICTURE.write_text(draw(), encoding="utf-8")
    except PointsUp as error:
        sys.exit(str(error))
