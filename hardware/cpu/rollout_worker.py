"""vLLM's CPU worker with exact logprobs and a backend's attention, chosen in the process that builds the model.

With tensor parallelism that is a process of each worker, into which nothing is inherited but a class by its name. An
engine's process may build a model of another kind later, so that the plain worker takes back what the other installs.
Neither inherits from the other: vLLM mixes its extension into a worker's class and refuses one that has it already.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from hardware.cpu import image_rule
from hardware.cpu.exact_logprobs import ExactSampler


class PlainWorker(CPUWorker):
    """Computes attention as vLLM does."""

    def init_device(self) -> None:
        image_rule.uninstall()
        super().init_device()
        self.model_runner.sampler = ExactSampler(self.model_runner.sampler)


class ImageRuleWorker(CPUWorker):
    """Lets the tokens of an image see each other."""

    def init_device(self) -> None:
        image_rule.install()
        super().init_device()
        self.model_runner.sampler = ExactSampler(self.model_runner.sampler)
