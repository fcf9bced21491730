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
from dataclasses import replace
from difflib import get_close_matches
from io import StringIO
from typing import Any

from verl_ext.checks import TEXT, is_integer
from verl_ext.driver.preflight.data import column, extra_infos, used_files
from verl_ext.driver.preflight.extensions import LOOPS, read_yaml, refusing
from verl_ext.driver.preflight.faults import Faults
from verl_ext.driver.preflight.keys import ROLLOUT

TOOLS_FILE = f"{ROLLOUT}.multi_turn.tool_config_path"
OUR_TOOLS = "verl_ext.driver.tools."
OBSERVATION = f"{ROLLOUT}.multi_turn.max_tool_response_length"
WITHOUT_TOOLS = "single_turn_agent"  # verl's agent loop that offers no tools
AGENT = "rollout_driver.agent_timeout"
STALL = "rollout_driver.stall_timeout"
COMMAND_TIMEOUT = 60.0  # seconds of the first command in a sandbox, and of the end of the sandbox


def check_tool_limits(faults: Faults) -> None:
    """The file lists usable tools. Some row's loop calls ours, verl shows their whole observations, and a sandbox lasts
    as long as its agent may."""
    from verl_ext.sandbox.deployments import longest_life

    tools = _ours(faults)
    if not tools:
        return
    loops = {(key, loop or faults[LOOPS]) for key, _, loop in column(faults, "agent_name")}
    if loops and loops == {(key, WITHOUT_TOOLS) for key in used_files(faults)}:  # not if the rows cannot be read
        valid = f"no row's agent loop calls its tools, use {LOOPS}=tool_agent, or tool_agent as agent_name of rows"
        faults.refuse_if(True, TOOLS_FILE, valid)
    longest, name = max((getattr(tool, "longest_observation", 0), tool.name) for tool in tools)
    shown = faults[OBSERVATION]
    valid = f"observations of the tool {name} have up to {longest} characters, use at least {longest}"
    faults.refuse_if(is_integer(shown) and shown < longest, OBSERVATION, valid)
    needed = faults[AGENT] or 0
    for tool in _sandboxed(tools):
        settings = tool.sandbox_settings
        life = longest_life(settings["deployment"], settings["lifetime"])
        seconds, name = min((settings["idle_timeout"], "idle_timeout"), life)
        if seconds < needed:
            valid = f"{name}={seconds:g} of the tool {tool.name} ends sandboxes of agents that still work"
            faults.refuse_if(True, TOOLS_FILE, f"{valid}, use at least {AGENT}={needed:g}")
            return


def check_tool_rows(faults: Faults) -> None:
    """Every row names the container images that its tools lack, and tests for ``submit`` that can be run and judged.
    Tools that share a sandbox have the same settings and arguments for it.

    A tool lacks an image if its deployment needs one and names none. The tests must end before the run counts as
    stalled.
    """
    from verl_ext.driver.tools.shell import SubmitTool
    from verl_ext.sandbox.deployments import IMAGE
    from verl_ext.sandbox.shell import SandboxFailure

    tools = _sandboxed(_ours(faults))
    needing = [tool for tool in tools if tool.sandbox_settings["deployment"].lacks_image]
    submits = [tool for tool in tools if isinstance(tool, SubmitTool)]
    groups: dict[tuple[Any, ...], None] = {}  # of tools that share a sandbox, in the order of the rows
    for key, number, extra in _rows(faults) if needing or submits or len(tools) > 1 else ():
        sharing = tuple(tool for tool in tools if _offers(extra, tool.name))
        groups[sharing] = None
        given = {tool.name: _arguments(extra, tool.name) for tool in sharing}
        for argument in ("image", "setup", "shell_setup") if not faults.has_refused(key) else ():
            values = [each.get(argument) or None for each in given.values()]
            valid = f"{' and '.join(given)} work in one sandbox, so give them the same {argument}"
            faults.refuse_if(values != values[:1] * len(values), key, f"row {number}: {valid}")
        for tool in submits:
            if tool not in sharing or faults.has_refused(key):
                continue
            try:
                seconds = tool.tests(given[tool.name]).timeout
                if not faults.has_refused(STALL):
                    valid = f"the tests of row {number} of {key} may take {seconds:g} seconds, use more than that"
                    faults.refuse_if(seconds >= faults[STALL], STALL, valid)
            except SandboxFailure as error:
                other = f"a row without tests needs agent_name={WITHOUT_TOOLS} or tool_selection without {tool.name}"
                faults.refuse_if(True, key, f"row {number}: {str(error).removesuffix('.')}; {other}")
        for tool in needing:
            image = given.get(tool.name, {}).get("image")
            if tool in sharing and not faults.has_refused(key) and not IMAGE.accepts(image):
                where = f"extra_info.tools_kwargs.{tool.name}.create_kwargs.image"
                valid = f"row {number} has {where}={image!r:.80}, and it must name a container image"
                other = f"{faults[TOOLS_FILE]} gives deployment.image or the row's agent_name is {WITHOUT_TOOLS}"
                faults.refuse_if(True, key, f"{valid}, unless {other}")
    for sharing in groups:
        for tool in sharing[1:]:
            first = sharing[0].sandbox_settings
            different = ", ".join(name for name, value in tool.sandbox_settings.items() if value != first[name])
            valid = f"{sharing[0].name} and {tool.name} work in one sandbox, so give them the same {different}"
            faults.refuse_if(bool(different), TOOLS_FILE, valid)


def start_sandboxes(faults: Faults) -> None:
    """A sandbox starts and its shell runs a command, once for each different way in which the tools start sandboxes.

    The sandbox gets the arguments of the first row that names an image. If no row names an image, or the deployment
    uses none, the sandbox gets the arguments of the first row that has any.
    """
    from verl_ext.sandbox.shell import Sandbox, SandboxFailure, SandboxKilled

    tried: list[tuple[Any, ...]] = []
    for tool in _sandboxed(_ours(faults)):
        deployment, arguments = tool.sandbox_settings["deployment"], {}
        if deployment.has_images:
            arguments = next((row for row in _offering(faults, tool.name) if row.get("image")), {})
        if not arguments:
            arguments = next((row for row in _offering(faults, tool.name) if any(row.values())), {})
        image = arguments.get("image") or deployment.image
        if deployment.lacks_image and not image:
            continue
        try:
            plan = replace(tool.plan(arguments), pauses=(0.0,))  # one attempt
            way = (deployment, image, plan.setup, plan.shell_setup)
            if way not in tried:
                tried.append(way)
                asyncio.run(_try(Sandbox(plan)))
        except (SandboxFailure, SandboxKilled) as error:
            of = f" of {image}" if deployment.has_images else ""
            where = f"no sandbox{of} can be started with deployment.type {deployment.type}"
            faults.refuse_if(True, TOOLS_FILE, f"{where} ({' '.join(str(error).split())})")
            return


async def _try(sandbox: Any) -> None:
    from verl_ext.sandbox.shell import NEEDS, SandboxFailure

    try:
        outcome = await sandbox.run("echo works", COMMAND_TIMEOUT)
        if outcome.output != "works\n":
            raise SandboxFailure(f"the shell does not work; {NEEDS}")
    finally:
        sandbox.abort()
        sandbox.join(COMMAND_TIMEOUT)


def _listed(faults: Faults) -> list[Any]:
    content = read_yaml(faults, TOOLS_FILE)
    tools = content.get("tools") if isinstance(content, Mapping) else None
    if content is not None and not isinstance(tools, list):
        faults.refuse_if(True, TOOLS_FILE, "it must hold a list named tools")
    return tools if isinstance(tools, list) else []


def _made(faults: Faults, number: int, tool: Any) -> Any:
    """The tool, if its class is ours or made from ours; None for other classes, and if the tool has a fault.

    Tools of other packages are not made: verl's own tools start a Ray cluster.
    """
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
        schema = _checked_schema(made, tool.get("tool_schema"))
        if any(each.__module__.startswith(OUR_TOOLS) for each in getattr(made, "__mro__", ())):
            with redirect_stdout(StringIO()):  # verl prints the schema of every tool that is made
                return made(config=dict(config), tool_schema=schema)
        if config["type"] == "native":
            inspect.signature(made).bind(config={}, tool_schema=None)  # as verl makes a tool
            if not callable(getattr(made, "execute", None)):
                raise TypeError("it has no method execute")
    return None


def _checked_schema(tool: type, schema: Any) -> Any:
    """The schema of a tool's entry, as verl reads it. An entry without a schema gets the schema of its class.

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
        return None
    try:
        return OpenAIFunctionToolSchema.model_validate(schema)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, ('tool_schema', *first['loc'])))}: {first['msg']}") from None


def _path(faults: Faults) -> object:
    """The value of the key, even if a fault of an earlier tool has refused the key: each tool's fault is reported."""
    return faults.config.actor_rollout_ref.rollout.multi_turn.tool_config_path


def _ours(faults: Faults) -> list[Any]:
    """The listed tools whose classes are ours, or made from ours.

    If the file of tools was refused, reading its key ends the check.
    """
    made = (_made(faults, number, tool) for number, tool in enumerate(_listed(faults)))
    return [tool for tool in made if tool is not None]


def _sandboxed(tools: list[Any]) -> list[Any]:
    """The tools with a sandbox."""
    return [tool for tool in tools if hasattr(tool, "sandbox_settings")]


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


def _offering(faults: Faults, tool: str) -> Iterator[Mapping[str, Any]]:
    """The arguments of this tool in each row that offers the tool."""
    return (_arguments(extra, tool) for _, _, extra in _rows(faults) if _offers(extra, tool))


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
