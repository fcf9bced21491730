"""Where a first run happens: the hardware, the number of nodes and GPUs, the model; and the keys that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from verl_ext.files import quoted
from verl_ext.hardware.memory import FSDP2_KEYS, GPU_MEMORY, SHARED_KEYS, Settings, settings, use
from verl_ext.hardware.shapes import Shape, find

CPU = "cpu"
PROMPT = 128  # tokens; the prompts are a line each, with room for a chat template
RESPONSE_ON_CPU, RESPONSE_ON_GPUS = 24, 256  # tokens
SENDING_BYTES = 2048 * 2**20  # verl's buffer for weights on their way to vLLM, update_weights_bucket_megabytes
SEQUENCES = 8  # longest sequences in a micro-batch; a trial would not fill a larger token budget


class NotTried(Exception):
    """This place cannot run a trial. The message is the reason."""


@dataclass(frozen=True)
class Place:
    """Machines and a model.

    Attributes:
        hardware: profile, such as ``cpu`` or ``h200``.
        nodes: number of nodes.
        gpus: GPUs of each node; on the CPU, slots for a worker.
        model: folder, or name on the hub.
        address: address of the Ray cluster to join; None: each training starts Ray on this machine.
    """

    hardware: str
    nodes: int
    gpus: int
    model: str
    address: str | None = None

    def devices(self, mode: str) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """(nodes, devices per node) of the training and of the separate pool of engines, or None without such a pool.

        Raises:
            NotTried: the mode needs more devices.
        """
        if mode != "separate_async":
            return (self.nodes, self.gpus), None
        if self.nodes > 1:
            return (self.nodes - self.nodes // 2, self.gpus), (self.nodes // 2, self.gpus)
        if self.gpus > 1:
            return (1, self.gpus - self.gpus // 2), (1, self.gpus // 2)
        if self.hardware == CPU and self.address is None:  # Ray gets as many slots as the run needs
            return (1, 1), (1, 1)
        raise NotTried(f"{mode} trains and generates on different GPUs, and there is only one")

    def overrides(self, mode: str) -> list[str]:
        """Keys of a training in this mode: devices, lengths, sizes of batches and, on GPUs, of everything in memory."""
        (nodes, gpus), pool = self.devices(mode)
        batch = self.batch(nodes * gpus)
        keys: dict[str, object] = {
            "hardware": self.hardware,
            "trainer.v1.trainer_mode": mode,
            "trainer.nnodes": nodes,
            "trainer.n_gpus_per_node": gpus,
            "actor_rollout_ref.model.path": quoted(self.model),
            "data.max_prompt_length": PROMPT,
            "data.max_response_length": self.longest - PROMPT,
            "actor_rollout_ref.rollout.max_model_len": self.longest,
            "data.train_batch_size": batch,
            "actor_rollout_ref.actor.ppo_mini_batch_size": batch // 2,
        }
        if pool is not None:
            keys |= {
                "actor_rollout_ref.hybrid_engine": "false",
                "actor_rollout_ref.rollout.nnodes": pool[0],
                "actor_rollout_ref.rollout.n_gpus_per_node": pool[1],
                "actor_rollout_ref.rollout.checkpoint_engine.backend": "gloo" if self.hardware == CPU else "nccl",
            }
        if self.hardware != CPU:
            keys |= {"model_size": "1_5b"} | fitting_keys(self.fitting(nodes * gpus))
        return [f"{key}={value}" for key, value in keys.items()]

    @property
    def longest(self) -> int:
        """Tokens of prompt and response together."""
        return PROMPT + (RESPONSE_ON_CPU if self.hardware == CPU else RESPONSE_ON_GPUS)

    def batch(self, devices: int) -> int:
        """Prompts of a step: two mini-batches, each with a prompt for every device of the training."""
        return 2 * max(2, devices)

    @cached_property
    def shape(self) -> Shape:
        """Shape of the model; ValueError if its ``config.json`` cannot be had."""
        return find(self.model)

    def fitting(self, devices: int) -> Settings:
        """As of ``verl-ext hardware``, with the token budget of a micro-batch of ``SEQUENCES``.

        Raises:
            ValueError: the model does not fit.
        """
        chosen = settings(self.shape, GPU_MEMORY[self.hardware], devices, self.longest)
        budget = SEQUENCES * self.longest
        return replace(
            chosen,
            ppo_max_token_len_per_gpu=min(chosen.ppo_max_token_len_per_gpu, budget),
            log_prob_max_token_len_per_gpu=min(chosen.log_prob_max_token_len_per_gpu, budget),
        )

    def predicted_memory(self, mode: str) -> float | None:
        """Bytes of the training's process on a GPU, by the arithmetic of ``verl-ext hardware``; None on the CPU.

        To the training state, the largest of three is added: the update, the log-probs, and verl's buffer for sending
        weights. ``verl-ext hardware`` leaves the buffer out, because the update of a larger model takes more.
        """
        if self.hardware == CPU:
            return None
        (nodes, gpus), _ = self.devices(mode)
        devices = nodes * gpus
        held = use(self.shape, GPU_MEMORY[self.hardware], devices, self.longest, self.fitting(devices))
        return held.training_state + max(held.update, held.log_probs, SENDING_BYTES)


def fitting_keys(chosen: Settings) -> dict[str, object]:
    """verl's keys of the settings, with the braces of ``FSDP2_KEYS`` written out."""
    keys: dict[str, object] = {}
    for name, key in (SHARED_KEYS | FSDP2_KEYS).items():
        start, _, rest = key.partition("{")
        inside, _, end = rest.partition("}")
        for part in inside.split(","):
            keys[start + part + end] = str(getattr(chosen, name)).lower()
    return keys
