"""Weight sync into vLLM's CPU backend (``rollout.engine_kwargs.vllm.worker_extension_cls``)."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """Reloads weights the way vLLM's CPU backend allows.

    That backend repacks every linear weight for oneDNN and drops the original parameter, so verl's in-place
    ``load_weights`` finds no parameter to write to. vLLM's own ``reload_weights`` restores, reloads and repacks.
    """

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        if peft_config and base_sync_done:  # adapters are kept beside the weights, and are not repacked
            return super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
        received = {}

        def keep(weights, is_last):
            # The tensors are views of shared memory, and the next bucket overwrites the memory. In a model with
            # adapters, verl's name of a weight is x.base_layer.weight, and the name for vLLM's loader is x.weight.
            received.update((name.replace(".base_layer.", "."), tensor.clone()) for name, tensor in weights)

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=keep)
        self.model_runner.reload_weights(weights_iterator=iter(received.items()))
        if self.model_runner.model_config.hf_text_config.tie_word_embeddings:
            # A tied head has no own weight to reload: vLLM would otherwise keep the head's old packed weight.
            for module in self.model_runner.get_model().modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
