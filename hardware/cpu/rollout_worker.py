"""vLLM's CPU worker with exact logprobs and a backend's attention, chosen in the process that builds the model.

With tensor parallelism that is a process of each worker, into which nothing is inherited but a class by its name. An
engine's process may build a model of another kind later, so that the plain worker takes back what the other installs.
Neither inherits from the other: vLLM mixes its extension into a worker's class and refuses one that has it already.
"""

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from hardware.cpu.exact_logprobs import ExactSampler


class PlainWorker(CPUWorker):
    """Computes attention as vLLM does."""

    def init_device(self) -> None:
        selector._cached_get_attn_backend.cache_clear()
        AttentionBackendEnum.CPU_ATTN.clear_override()  # an engine before this one may have had the image rule
        super().init_device()
        self.model_runner.sampler = ExactSampler(self.model_runner.sampler)


class ImageRuleWorker(CPUWorker):
    """Lets the tokens of an image see each other."""

    def init_device(self) -> None:
        from hardware.cpu import image_rule  # models of text alone load nothing of it

        image_rule.install()
        super().init_device()
        self.model_runner.sampler = ExactSampler(self.model_runner.sampler)
