"""Python that users bring: reward functions, tools, agent loops, data sets, callbacks. All must be
importable on this machine.

Importing a user's module can raise anything, and can end Python.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_ext.checks import TEXT
from verl_ext.data.schema import is_text_or_number
from verl_ext.driver.preflight.data import column
from verl_ext.driver.preflight.faults import Faults, RefusedKey
from verl_ext.driver.preflight.files import first_line
from verl_ext.driver.preflight.keys import ROLLOUT

REWARD = "reward.custom_reward_function"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # of a reward function, by name
OF_MATH_VERIFY = tuple(f"pkg://verl_ext.data.{name}" for name in ("math_reward", "think_answer_reward"))
LOOPS, LOOPS_FILE = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.agent.agent_loop_config_path"
TOOLS_CODE = f"{ROLLOUT}.multi_turn.function_tool_path"


def check_reward_function(faults: Faults) -> None:
    """The user's reward function is a function of verl's four arguments and of ``reward_kwargs``."""
    section = faults[REWARD]
    if not section or not section.get("path"):
        return
    function = _loaded(faults, f"{REWARD}.path", f"{REWARD}.name")
    if function is None:
        return
    if not callable(function):
        faults.refuse_if(True, f"{REWARD}.path", f"{section['name']} must be a function, and it is {function!r:.60}")
        return
    if not _functions_judge(faults):
        return  # another manager, or a reward model, may pass more
    more = dict.fromkeys(section.get("reward_kwargs") or {})
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS) | more)
    except TypeError as error:
        given = ", ".join((*ARGUMENTS, *more))
        faults.refuse_if(True, f"{REWARD}.path", f"{section['name']} must take the arguments {given} ({error})")
    except ValueError:
        pass  # a function without a signature, such as a builtin


def check_data_sources(faults: Faults) -> None:
    """If the user gives no reward function, verl has a reward function for the data source of every row.

    Not checked if the user has agent loops, another reward manager or a reward model: each may judge by itself.
    """
    if faults[f"{REWARD}.path"] or faults[LOOPS_FILE] or not _functions_judge(faults):
        return
    for key, number, source in column(faults, "data_source"):
        if not _is_judged_by_verl(source):
            valid = f"verl has no reward function for data_source={source!r:.60} (row {number} of {key})"
            faults.refuse_if(True, f"{REWARD}.path", f"{valid}, name a file or pkg://package.module with one")
            return


def check_ground_truths(faults: Faults) -> None:
    """Our rewards for mathematics get ground truths by which math-verify can judge."""
    reward = faults[f"{REWARD}.path"]
    for key, number, judged in column(faults, "reward_model") if reward in OF_MATH_VERIFY else ():
        if not is_text_or_number(truth := judged["ground_truth"]):
            valid = f"row {number} has ground_truth={truth!r:.60}, and {reward} needs a text or a number"
            faults.refuse_if(True, key, valid)
            return


def _functions_judge(faults: Faults) -> bool:
    """Whether one of verl's reward managers calls a reward function, without a reward model."""
    return faults["reward.reward_manager.source"] == "register" and not faults["reward.reward_model.enable"]


@cache
def _is_judged_by_verl(data_source: object) -> bool:
    from verl.utils.reward_score import default_compute_score

    try:
        default_compute_score(data_source, "", None)
    except Exception as error:  # verl's function for this data source may fail on the values given here
        return not isinstance(error, NotImplementedError)
    return True


def check_classes(faults: Faults) -> None:
    """The user's reward manager, data set and checkpoint callback are classes of the right kind."""
    from torch.utils.data import Dataset
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
    from verl.utils.import_utils import load_class_from_fqn

    if faults["reward.reward_manager.source"] == "importlib":
        _check_class(faults, "reward.reward_manager.module.path", "reward.reward_manager.name", object)
    if faults["data.custom_cls.path"] is not None:
        _check_class(faults, "data.custom_cls.path", "data.custom_cls.name", Dataset)
    key = "trainer.checkpoint_callback_class"
    if name := faults[key]:
        with refusing(faults, key, name, "it cannot be imported"):
            made = load_class_from_fqn(name)
            faults.refuse_if(
                not _is_class(made, CheckpointCallback), key, "use a subclass of verl's CheckpointCallback"
            )


def check_modules(faults: Faults) -> None:
    """The modules that verl imports by name can be imported."""
    for key in ("actor_rollout_ref.model.external_lib", f"{ROLLOUT}.checkpoint_engine.custom_backend_module"):
        names = faults[key] or []
        for name in [names] if isinstance(names, str) else names:
            with refusing(faults, key, name, "it cannot be imported"):
                importlib.import_module(name)


def check_agent_loops(faults: Faults) -> None:
    """The default loop and the rows' loops are verl's or in the user's file, and all loops of the file can be
    imported."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.utils.import_utils import load_class_from_fqn

    known = list(_agent_loop_registry)
    loops = read_yaml(faults, LOOPS_FILE)
    for number, loop in enumerate(loops if isinstance(loops, list) else [loops] if loops is not None else []):
        described = isinstance(loop, Mapping) and TEXT.accepts(loop.get("name")) and TEXT.accepts(loop.get("_target_"))
        if not described:
            faults.refuse_if(True, LOOPS_FILE, f"entry {number} must hold name and _target_, the loop's class")
            return
        with refusing(faults, LOOPS_FILE, faults[LOOPS_FILE], f"{loop['_target_']} cannot be imported"):
            load_class_from_fqn(loop["_target_"])
            known.append(loop["name"])
    if not faults.has_refused(LOOPS_FILE):
        valid = f"use one of {', '.join(known)}, or describe it in {LOOPS_FILE}"
        faults.refuse_if(faults[LOOPS] not in known, LOOPS, valid)
        for key, number, name in column(faults, "agent_name"):
            if name is not None and name not in known:
                faults.refuse_if(True, key, f"row {number} has agent_name={name!r:.60}, {valid}")
                return


def check_tool_functions(faults: Faults) -> None:
    """The user's file of tools that are functions can be loaded."""
    from verl.tools.function_tool import load_function_tools_from_path
    from verl.utils.import_utils import resolve_config_path

    if path := faults[TOOLS_CODE]:
        with refusing(faults, TOOLS_CODE, path, "it cannot be loaded"):
            load_function_tools_from_path(resolve_config_path(path))


EXTENSIONS = (
    check_reward_function,
    check_data_sources,
    check_ground_truths,
    check_classes,
    check_modules,
    check_agent_loops,
    check_tool_functions,
)


def read_yaml(faults: Faults, key: str) -> Any:
    """The content of the YAML file at ``key``, resolved; None without a file, and for a refused file."""
    from verl.utils.import_utils import resolve_config_path

    if not faults[key]:
        return None
    with refusing(faults, key, faults[key], "it is not a YAML file"):
        content = OmegaConf.load(resolve_config_path(faults[key]))
        if isinstance(content, DictConfig | ListConfig):
            return OmegaConf.to_container(content, resolve=True)
    return None


def _check_class(faults: Faults, path: str, name: str, base: type) -> None:
    made = _loaded(faults, path, name)
    faults.refuse_if(made is not None and not _is_class(made, base), path, f"{faults[name]} must be a {base.__name__}")


def _is_class(made: object, base: type) -> bool:
    return isinstance(made, type) and issubclass(made, base)


def _loaded(faults: Faults, path: str, name: str) -> Callable[..., Any] | None:
    """The object called ``name`` in the module at ``path``; None if one of the two keys is refused."""
    from verl.utils.import_utils import load_extern_object

    for key, valid in ((path, "name a Python file, or a module as pkg://package.module"), (name, "use a text")):
        faults.refuse_if(not TEXT.accepts(faults[key]), key, valid)
    with refusing(faults, path, faults[path], f"{faults[name]} cannot be loaded"):
        return load_extern_object(faults[path], faults[name])
    return None


@contextmanager
def refusing(faults: Faults, key: str, value: object, obstacle: str) -> Iterator[None]:
    """Refuse ``value`` if the block raises or ends Python: ``<obstacle> (<cause>)``."""
    try:
        yield
    except RefusedKey:
        raise
    except (Exception, SystemExit) as error:
        faults.refuse(key, value, f"{obstacle} ({first_line(error)})")
