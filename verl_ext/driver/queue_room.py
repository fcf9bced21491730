"""Room in TransferQueue for the rows of a step."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_ext.driver.preflight.bad_config import is_count, refuse_if

SIZE = "transfer_queue.backend.SimpleStorage.total_storage_size"
COMPLAINT = "Storage capacity exceeded"  # of TransferQueue's storage


class QueueFull(RuntimeError):
    """TransferQueue takes no more rows from the driver. The message names the key to change."""


def check_queue_size(config: DictConfig) -> None:
    """Raise BadConfig if TransferQueue cannot hold what any step brings, a row for each prompt and each rollout."""
    size = OmegaConf.select(config, SIZE)
    if size is None or config.transfer_queue.backend.storage_backend != "SimpleStorage":
        return
    refuse_if(not is_count(size), config, SIZE, "use an integer of at least 1, or null for no limit")
    prompts, rollouts = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    refuse_if(not is_count(rollouts), config, "actor_rollout_ref.rollout.n", "use an integer of at least 1")
    rows = prompts * (1 + rollouts)
    needs = f"data.train_batch_size={prompts} prompts with actor_rollout_ref.rollout.n={rollouts} rollouts each"
    more = "what is buffered or validated comes on top: use more, or null for no limit"
    refuse_if(size < rows, config, SIZE, f"{needs} are {rows} rows, and {more}")


def check_queue_full(error: Exception, config: DictConfig) -> None:
    """Raise QueueFull from ``error`` if that is TransferQueue's way of saying so."""
    if COMPLAINT in str(error):
        raise QueueFull(
            f"TransferQueue is full with {SIZE}={OmegaConf.select(config, SIZE)} rows: raise it, or use null for no "
            "limit, and start the same command again; it goes on from the last checkpoint"
        ) from error
