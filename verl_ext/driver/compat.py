"""Checks the installed verl for the functions and constants used by the driver."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from omegaconf import OmegaConf

from verl_ext.errors import RunError
from verl_ext.resolvers import leaves

VERL_VERSION = "0.9.1"  # the tested one
KEEPS_QUEUE = 'self.trainer_mode != "sync"'  # verl's condition for prompts in the queue and the queue in checkpoints
logger = logging.getLogger(__name__)


@cache
def verl_defaults(model_engine: str) -> dict[str, Any]:
    """verl's defaults for ``model_engine`` by dotted key, from a file of verl; without such a file, those of ``dp``."""
    folder = resources.files("verl.trainer.config")
    names = (f"_generated_ppo_{prefix}trainer.yaml" for prefix in (f"{model_engine}_", ""))
    loaded = OmegaConf.load(str(next(folder / name for name in names if (folder / name).is_file())))
    return dict(leaves(OmegaConf.to_container(loaded, resolve=False)))


def check_verl() -> None:
    """Raise RunError unless the installed verl has the functions and constants used by the driver.

    A version other than the tested one is accepted if it has them, with a warning.
    """
    import verl

    try:
        signatures, constants = _signatures(), _constants()
    except (AttributeError, ImportError) as error:
        raise RunError(
            f"verl {verl.__version__} is installed and does not fit ({error}); this package is tested with verl "
            f"{VERL_VERSION}: pip install verl=={VERL_VERSION}"
        ) from error
    for function, parameters in signatures.items():
        check_signature(function, parameters)
    for function, names in constants.items():
        check_constants(function, names)
    if verl.__version__ != VERL_VERSION:
        logger.warning(
            "verl %s has the functions that this package uses, but this package is tested with verl %s only",
            verl.__version__,
            VERL_VERSION,
        )


def check_signature(function: Callable, parameters: tuple[str, ...]) -> None:
    """Raise RunError unless ``function`` still takes ``parameters``, in this order."""
    # Ray adds parameters named _ray_* to the methods of an actor.
    found = tuple(name for name in inspect.signature(function).parameters if not name.startswith("_ray_"))
    if found != parameters:
        raise RunError(
            f"{function.__module__}.{function.__qualname__} takes {found}, expected {parameters} "
            f"as in verl {VERL_VERSION}: pip install verl=={VERL_VERSION}"
        )


def check_constants(function: Callable, constants: tuple[str, ...]) -> None:
    """Raise RunError unless the source of ``function`` still contains the key names we write and read."""
    source = inspect.getsource(function)
    for constant in constants:
        if constant not in source:
            raise RunError(
                f"{function.__module__}.{function.__qualname__} no longer contains {constant!r} "
                f"as in verl {VERL_VERSION}: pip install verl=={VERL_VERSION}"
            )


def _signatures() -> dict[Callable, tuple[str, ...]]:
    from transfer_queue import async_kv_batch_put
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.experimental.reward_loop import RewardLoopWorker
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.metric_utils import bootstrap_metric, calc_maj_val
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold, _parse_rollout_rs_thresholds
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
    from verl.utils.tracking import Tracking
    from verl.workers.rollout.llm_server import LLMServerManager

    worker, runner = AgentLoopWorkerTQ.__ray_actor_class__, TaskRunnerV1.__ray_actor_class__
    return {
        run_ppo: ("config", "task_runner_class"),
        runner.run: ("self", "config"),
        runner.init_agent_loop_manager: ("self",),
        AgentLoopManagerTQ.generate_sequences: ("self", "prompts"),
        worker.generate_sequences: ("self", "batch"),
        worker._run_prompt: ("self", "prompt", "sampling_params", "trajectory", "trace"),
        worker._run_agent_loop: ("self", "sampling_params", "trajectory", "agent_name", "trace", "kwargs"),
        worker._agent_loop_postprocess: ("self", "output", "validate", "kwargs"),
        worker._compute_score: ("self", "outputs", "kwargs"),
        AgentLoopBase.ct_build_initial_tokens: (
            *("self", "messages", "tools", "images", "videos", "audios", "mm_inputs_out"),
        ),
        RewardLoopWorker.compute_score: ("self", "data"),
        async_kv_batch_put: ("keys", "partition_id", "fields", "tags", "data_parser"),
        ToolParser.get_tool_parser: ("name", "tokenizer"),
        _parse_rollout_is_threshold: ("threshold_spec",),
        _parse_rollout_rs_thresholds: ("options", "threshold_spec"),
        ReplayBuffer.sample: ("self", "global_steps", "partition_id", "batch_size"),
        ReplayBuffer._materialize_batch: ("self", "partition_id", "selected_prompt_uids", "partition_snapshot"),
        ReplayBuffer._sync_metadata_from_transfer_queue: ("self",),
        ReplayBuffer._clear_groups: ("self", "partition_id", "uids"),
        ReplayBuffer._wait_for_next_poll: ("self", "partition_id", "last_debug_time"),
        PPOTrainer._build_replay_buffer: ("self",),
        PPOTrainer._init_dataloader: ("self",),
        PPOTrainer._submit_batch_to_rollout: ("self", "batch"),
        PPOTrainer._reissue_inflight_prompts: ("self", "partition_id"),
        PPOTrainer.step: ("self", "metrics", "timing_raw"),
        PPOTrainer._save_checkpoint: ("self",),
        PPOTrainer._validate: ("self",),
        PPOTrainer._val_metrics_update: (
            *("self", "data_sources", "sample_uids", "reward_extra_infos_dict", "sample_turns", "expected_acc_counts"),
        ),
        bootstrap_metric: ("data", "subset_size", "reduce_fns", "n_bootstrap", "seed"),
        calc_maj_val: ("data", "vote_key", "val_key"),
        PPOTrainer._load_checkpoint: ("self",),
        PPOTrainer._get_required_batch_multiple: ("self", "dp_size"),
        PPOTrainer._balance_batch: ("self", "batch", "metrics", "logging_prefix", "keep_minibatch"),
        PPOTrainer._compute_old_log_prob: ("self", "batch", "metrics"),
        PPOTrainer._compute_advantage: ("self", "batch", "metrics"),
        PPOTrainer._update_actor: ("self", "batch", "metrics"),
        PPOTrainer._dump_generations: (
            *("self", "inputs", "outputs", "gts", "scores", "reward_extra_infos_dict", "dump_path"),
        ),
        PPOTrainer._compute_metrics: ("self", "batch", "metrics", "timing_raw", "global_steps", "epoch"),
        PPOTrainer.on_init_end: ("self",),
        PPOTrainer.on_train_begin: ("self",),
        PPOTrainer.on_step_begin: ("self",),
        PPOTrainer.on_sample_end: ("self",),
        PPOTrainer.on_step_end: ("self",),
        PPOTrainer.on_validate_begin: ("self",),
        PPOTrainer.prepare_step: ("self",),
        PPOTrainer.fit: ("self", "agent_loop_manager"),
        PPOTrainerSeparateAsync._setup: ("self",),
        PPOTrainerSeparateAsync.switch_to_trainer: ("self",),
        Tracking.log: ("self", "data", "step", "backend"),
        LLMServerManager.get_replicas: ("self",),
    }


def _constants() -> dict[Callable, tuple[str, ...]]:
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.trainer.ppo.metric_utils import bootstrap_metric, calc_maj_val, process_validation_metrics
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
    from verl.utils.reward_score import default_compute_score
    from verl.utils.tracking import Tracking, _TensorboardAdapter
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

    worker = AgentLoopWorkerTQ.__ray_actor_class__
    return {
        worker._run_prompt: (
            *('"__rollout_n__"', '"running"', '"finished"', '"failure"', "session_id=i"),
            "tq.async_kv_put(key=uid, partition_id=partition_id, tag=",
        ),
        worker._agent_loop_postprocess: (
            *('f"{uid}_{session_id}_{i}"', '"min_global_steps"', '"response_len"'),
            *("tq.async_kv_batch_put(", "keys=keys", "fields=list_of_dict_to_tensordict(fields)", "tags=tags"),
        ),
        AgentLoopWorker._compute_score: (
            "random.choice(self.reward_loop_worker_handles)",
            "await selected_reward_loop_worker_handle.compute_score.remote(data)",
        ),
        LLMServerClient.__init__: ("self._load_balancer = load_balancer_handle",),
        LLMServerClient._acquire_server: ("await self._load_balancer.acquire_server.remote(request_id=request_id",),
        LLMServerClient.generate: (
            *("server_id, server = await", "await server.generate.remote("),
            "request_id=self._vllm_request_id(request_id)",
        ),
        FullyAsyncLLMServerClient.generate: ('output.stop_reason not in ("aborted", "abort")',),
        AgentLoopWorker._run_agent_loop: (
            "trainer_config=DictConfigWrap(config=self.config)",
            "server_manager=self.llm_client",
            "tokenizer=self.tokenizer",
            "processor=self.processor",
            "hf_model_type=self.hf_model_type",
            "dataset_cls=self.dataset_cls",
            "data_config=DictConfigWrap(self.config.data)",
            "tools=ToolListWrap(self.tools)",
            '_agent_loop_postprocess(output, trajectory["validate"], **kwargs)',
        ),
        worker.generate_sequences: ("without waiting for the results", "asyncio.create_task("),
        ToolAgentLoop._handle_generating_state: ("self.server_manager.generate(", "if not agent_data.extra_fields"),
        default_compute_score: ("raise NotImplementedError(",),
        process_validation_metrics: ("= bootstrap_metric(", "[partial(calc_maj_val, vote_key=", "[np.max, np.min]"),
        bootstrap_metric: ("np.random.seed(seed)", "np.random.choice(n_data, size=(n_bootstrap, subset_size)"),
        calc_maj_val: ("max(vote2cnt, key=vote2cnt.get)", "vote2vals[maj_vote][0]"),
        compute_rollout_correction_and_rejection_mask: ("response_mask must contain at least one valid token",),
        PPOTrainerSeparateAsync.on_step_begin: ("self.current_mode != HybridEngineMode.ROLLOUT",),
        PPOTrainerSeparateAsync._compute_old_log_prob: (
            "self.actor_rollout_wg.save_model_to_cpu(0)",
            "return super()._compute_old_log_prob(batch, metrics)",
        ),
        PPOTrainer.fit: ("self.global_steps <= self.total_training_steps", "self.config.trainer.test_freq > 0"),
        Tracking.__init__: ('self.logger["wandb"] = wandb', 'self.logger["tensorboard"] = _TensorboardAdapter('),
        _TensorboardAdapter.__init__: ("self.writer = SummaryWriter(",),
        PPOTrainer._submit_batch_to_rollout: (KEEPS_QUEUE, '"is_prompt"', '"pending"', 'partition_id="train"'),
        PPOTrainer._update_actor: ("ppo_mini_batch_size", "rollout.n"),
        PPOTrainer._save_checkpoint: (
            KEEPS_QUEUE,
            'f"global_step_{self.global_steps}"',
            "latest_checkpointed_iteration.txt",
        ),
        PPOTrainer._load_checkpoint: (KEEPS_QUEUE,),
    }
