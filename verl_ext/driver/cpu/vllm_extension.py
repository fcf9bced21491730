"""Weight sync into vLLM's CPU backend (``rollout.engine_kwargs.vllm.worker_extension_cls``)."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """Reloads weights the way vLLM's CPU backend allows.

    It repacks every linear weight for oneDNN and drops the original parameter, so verl's in-place ``load_weights``
    finds nothing to write to. vLLM's own ``reload_weights`` restores, reloads and repacks.
    """

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        if peft_config:
            raise NotImplementedError("LoRA adapters are not synced on the CPU: set actor_rollout_ref.model.lora.merge")
        received = {}

        def keep(weights, is_last):
            # The tensors are views of the shared memory that the next bucket overwrites.
            received.update((name, tensor.clone()) for name, tensor in weights)

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=keep)
        self.model_runner.reload_weights(weights_iterator=iter(received.items()))
        if self.model_runner.model_config.hf_text_config.tie_word_embeddings:
            # A tied head has no weight of its own to reload, so vLLM keeps what it had packed for it before.
            for module in self.model_runner.get_model().modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
