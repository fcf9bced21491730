"""How often Python looks for garbage while a run starts."""

import gc
import importlib

from support.configs import compose

from verl_ext import garbage


def test_it_is_collected_still_but_rarely():
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        garbage.collect_rarely()
        assert gc.isenabled() and gc.get_threshold() == garbage.THRESHOLDS
    finally:
        gc.set_threshold(*before)


def test_rays_workers_on_a_cpu_do_so_too():
    hook = compose("grpo").ray_kwargs.ray_init.runtime_env.worker_process_setup_hook
    module, name = hook.rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is garbage.collect_rarely
