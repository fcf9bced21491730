"""Room in TransferQueue for the rows of a step."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_ext.driver.preflight.combinations import QUEUE_SIZE

COMPLAINT = "Storage capacity exceeded"  # of TransferQueue's storage


class QueueFull(RuntimeError):
    """TransferQueue takes no more rows from the driver. The message names the key to change."""


def check_queue_full(error: Exception, config: DictConfig) -> None:
    """Raise QueueFull from ``error`` if that is TransferQueue's way of saying so."""
    if COMPLAINT in str(error):
        raise QueueFull(
            f"TransferQueue is full with {QUEUE_SIZE}={OmegaConf.select(config, QUEUE_SIZE)} rows: raise it, or use "
            "null for no limit, and start the same command again; it goes on from the last checkpoint"
        ) from error
