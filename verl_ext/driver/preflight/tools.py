"""Tools of agents: their file, classes and settings, their columns of the data, and a first sandbox.

Without these checks, a misspelt class or a missing container runtime shows up in the first rollouts only, after Ray,
the engines and the model have started on every node.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from difflib import get_close_matches
from io import StringIO
from typing import Any, NamedTuple

from verl_ext.checks import TEXT
from verl_ext.driver.preflight.data import column, extra_infos
from verl_ext.driver.preflight.extensions import LOOPS, read_yaml, refusing
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.files import first_line
from verl_ext.driver.preflight.keys import ROLLOUT

TOOLS_FILE = f"{ROLLOUT}.multi_turn.tool_config_path"
OUR_TOOLS = "verl_ext.driver.tools."
WITHOUT_TOOLS = "single_turn_agent"  # verl's agent loop that offers no tools
STALL = "rollout_driver.stall_timeout"
COMMAND_TIMEOUT = 60.0  # seconds of the first command in a sandbox


class Sandboxed(NamedTuple):
    """One of our tools with a ``deployment``.

    Args:
        name: as the model calls the tool, and as ``tools_kwargs`` of a row names it.
        deployment: the checked :class:`~verl_ext.sandbox.deployments.DeploymentConfig`.
        lifetime: longest life of a sandbox, in seconds.
    """

    name: str
    deployment: Any
    lifetime: float


def check_tools(faults: Faults) -> None:
    """The file lists tools whose classes are importable; our own tools accept their settings, and share one sandbox.

    Tools of other packages are not made: verl's own tools start a Ray cluster.
    """
    made = [_made(faults, number, tool) for number, tool in enumerate(_listed(faults))]
    first, *others = [tool for tool in made if hasattr(tool, "sandbox_settings")] or [None]
    for tool in others:
        settings = first.sandbox_settings
        different = ", ".join(name for name, value in tool.sandbox_settings.items() if value != settings[name])
        valid = f"{first.name} and {tool.name} work in one sandbox, so give both the same {different}"
        if different:
            faults.add(f"{TOOLS_FILE}={_path(faults)} is not valid: {valid}", TOOLS_FILE)


def check_tool_rows(faults: Faults) -> None:
    """Every row names the container images that its tools lack, and tests for ``submit`` that can be run and judged.
    Tools that share a sandbox have the same arguments for it.

    A tool lacks an image if its deployment needs one and names none. The tests must end before the run counts as
    stalled.
    """
    from verl_ext.driver.tools.shell import LIMITS, SubmitTool, tests_of
    from verl_ext.sandbox.deployments import IMAGE
    from verl_ext.sandbox.shell import SandboxFailure

    sandboxed = _sandboxed(faults)
    needing = [tool for tool in sandboxed if tool.deployment.has_images and not tool.deployment.image]
    submits = [tool for tool in _ours(faults) if isinstance(tool, SubmitTool)]
    longest = max((tool.config.get("test_timeout", LIMITS["test_timeout"][0]) for tool in submits), default=0)
    for key, number, extra in _rows(faults) if needing or submits else ():
        sharing = [tool.name for tool in sandboxed if _offers(extra, tool.name)]
        for name in ("image", "setup", "shell_setup") if not faults.has_refused(key) else ():
            values = [_arguments(extra, each).get(name) or None for each in sharing]
            other = f"{' and '.join(sharing)} work in one sandbox, so give both the same {name}"
            faults.refuse_if(values != values[:1] * len(values), key, f"row {number}: {other}")
        if submits and _offers(extra, "submit") and not faults.has_refused(key):
            try:
                seconds = tests_of(_arguments(extra, "submit"), longest).timeout
                if not faults.has_refused(STALL):
                    valid = f"the tests of row {number} of {key} may take {seconds:g} seconds, use more than that"
                    faults.refuse_if(seconds >= faults[STALL], STALL, valid)
            except SandboxFailure as error:
                other = f"; a row without tests needs agent_name={WITHOUT_TOOLS} or tool_selection without submit"
                faults.refuse_if(True, key, f"row {number}: {str(error).removesuffix('.')}{other}")
        for tool in needing:
            image = _arguments(extra, tool.name).get("image")
            if _offers(extra, tool.name) and not faults.has_refused(key) and not IMAGE.accepts(image):
                where = f"extra_info.tools_kwargs.{tool.name}.create_kwargs.image"
                valid = f"row {number} has {where}={image!r:.80}, and it must name a container image"
                other = f"{faults[TOOLS_FILE]} gives deployment.image or the row's agent_name is {WITHOUT_TOOLS}"
                faults.refuse_if(True, key, f"{valid}, unless {other}")


def start_sandboxes(faults: Faults) -> None:
    """A sandbox starts and its shell runs a command, once for each different deployment of the tools.

    The sandbox gets the first image that a row names; if no row names an image, it gets the deployment's.
    """
    from verl_ext.sandbox.deployments import deployment_maker
    from verl_ext.sandbox.places import PlaceFailure

    tools = _sandboxed(faults)
    tried: list[tuple[Any, str | None]] = []
    for tool in tools:
        named = (
            _arguments(extra, tool.name).get("image") for _, _, extra in _rows(faults) if _offers(extra, tool.name)
        )
        image = next(filter(None, named), tool.deployment.image)
        if (tool.deployment, image) in tried or (tool.deployment.has_images and not image):
            continue
        tried.append((tool.deployment, image))
        try:
            asyncio.run(_try(deployment_maker(tool.deployment, image, tool.lifetime)()))
        except (PlaceFailure, ImportError, ValueError) as error:
            of = f" of {image}" if tool.deployment.has_images else ""
            where = f"no sandbox{of} can be started with deployment.type {tool.deployment.type}"
            faults.refuse_if(True, TOOLS_FILE, f"{where} ({first_line(error)})")
            return


async def _try(place: Any) -> None:
    from verl_ext.sandbox.bash import Bash, ShellEnded
    from verl_ext.sandbox.places import PlaceFailure

    needs = "it needs base64, bash, cat, dd and head, and 251 open files"
    try:
        await place.start()
        answer = await (await Bash.open(place, 1000)).run(b"echo works", COMMAND_TIMEOUT)
        if answer.head != b"works\n":
            raise PlaceFailure(f"its shell does not work: {needs}")
    except ShellEnded as error:
        raise PlaceFailure(f"its shell does not work: {needs}; {error}") from None
    finally:
        await place.stop()


def _listed(faults: Faults) -> list[Any]:
    content = read_yaml(faults, TOOLS_FILE)
    tools = content.get("tools") if isinstance(content, Mapping) else None
    if content is not None and not isinstance(tools, list):
        faults.refuse_if(True, TOOLS_FILE, "it must hold a list named tools")
    return tools if isinstance(tools, list) else []


def _made(faults: Faults, number: int, tool: Any) -> Any:
    """The tool, if its class is ours; None for other classes, and if the file is refused for this tool."""
    from verl.tools.tool_registry import ToolType
    from verl.utils.import_utils import load_class_from_fqn

    types = [kind.value for kind in ToolType]
    name = tool.get("class_name") if isinstance(tool, Mapping) else None
    config = tool.get("config") if isinstance(tool, Mapping) else None
    if not TEXT.accepts(name) or not isinstance(config, Mapping) or config.get("type") not in types:
        valid = f"tool {number} must hold class_name and config, with type {' or '.join(types)}"
        faults.add(f"{TOOLS_FILE}={_path(faults)} is not valid: {valid}", TOOLS_FILE)
        return None
    with refusing(faults, TOOLS_FILE, _path(faults), f"{name} cannot be loaded{_near(name)}"):
        made = load_class_from_fqn(name)
        _check_schema(made, tool.get("tool_schema"))
        if name.startswith(OUR_TOOLS):
            with redirect_stdout(StringIO()):  # verl prints the schema of every tool that is made
                return made(config=dict(config), tool_schema=None)
        if config["type"] == "native":
            inspect.signature(made).bind(config={}, tool_schema=None)  # as verl makes a tool
            if not callable(getattr(made, "execute", None)):
                raise TypeError("it has no method execute")
    return None


def _check_schema(tool: type, schema: Any) -> None:
    """verl can read the schema of a tool's entry. Without one, verl's base class takes the schema of the tool's class.

    Raises:
        ValueError: there is no such schema.
    """
    from pydantic import ValidationError
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema

    if schema is None:
        own = ("__init__", "get_openai_tool_schema")
        inherited = all(getattr(tool, name, None) is getattr(BaseTool, name) for name in own)
        if inherited and not hasattr(tool, "tool_schema"):
            raise ValueError("it has no tool_schema, and its class no get_openai_tool_schema of its own")
        return
    try:
        OpenAIFunctionToolSchema.model_validate(schema)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, ('tool_schema', *first['loc'])))}: {first['msg']}") from None


def _path(faults: Faults) -> object:
    """The value of the key, even if a fault of an earlier tool has refused the key: each tool's fault is reported."""
    return faults.config.actor_rollout_ref.rollout.multi_turn.tool_config_path


def _ours(faults: Faults) -> list[Any]:
    """The listed tools whose classes are ours."""
    made = (_made(faults, number, tool) for number, tool in enumerate(_listed(faults)))
    return [tool for tool in made if tool is not None]


def _sandboxed(faults: Faults) -> list[Sandboxed]:
    """Our tools with a deployment. If the file of tools was refused, reading its key ends the check."""
    from verl_ext.driver.tools.shell import LIMITS
    from verl_ext.sandbox.deployments import deployment_config

    found = []
    for made in _ours(faults):
        if isinstance(made.config.get("deployment"), Mapping):
            config = deployment_config(made.config["deployment"])
            found.append(Sandboxed(made.name, config, float(made.config.get("lifetime", LIMITS["lifetime"][0]))))
    return found


def _rows(faults: Faults) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """As :func:`~.data.extra_infos`, without the rows whose agent loop offers no tools."""
    loops = column(faults, "agent_name")
    for row, (_, _, loop) in zip(extra_infos(faults), loops, strict=True):
        if (loop or faults[LOOPS]) != WITHOUT_TOOLS:
            yield row


def _offers(extra: Mapping[str, Any], tool: str) -> bool:
    """Whether a row offers this tool to the model: verl offers all tools, or those in ``extra_info.tool_selection``."""
    selection = extra.get("tool_selection")
    return not selection or tool in list(selection)


def _arguments(extra: Mapping[str, Any], tool: str) -> Mapping[str, Any]:
    """``extra_info.tools_kwargs.<tool>.create_kwargs`` of a row; empty if any part is missing."""
    section: Any = extra
    for name in ("tools_kwargs", tool, "create_kwargs"):
        section = section.get(name) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _near(name: str) -> str:
    """``; did you mean ...?`` if a module or a class nearly has this name."""
    module, _, last = name.rpartition(".")
    near = next((each for each in _candidates(module, last)), None)
    return f"; did you mean {near}?" if near else ""


def _candidates(module: str, last: str) -> Iterator[str]:
    package, _, own = module.rpartition(".")
    try:
        siblings = [each.name for each in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    except (ImportError, AttributeError, ValueError):
        siblings = []
    for sibling in [own] if own in siblings or not siblings else get_close_matches(own, siblings):
        with_package = f"{package}.{sibling}" if package else sibling
        try:
            content = importlib.import_module(with_package)
        except Exception:  # noqa: BLE001 - a user's module may raise anything, and is named by the fault itself
            continue
        classes = [each for each, made in vars(content).items() if inspect.isclass(made)]
        if last not in classes or sibling != own:
            yield from (f"{with_package}.{each}" for each in get_close_matches(last, classes, n=1))
