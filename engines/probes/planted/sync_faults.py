"""Known faults of a weight sync, and of the logprobs that a rollout engine returns."""

from hardware.attention.cell import Patch


def leave_out(part: str) -> list[Patch]:
    """Load none of the weights whose names contain a part, which then stay as they were."""
    from engines.vllm.worker import WeightSyncExtension

    def wrap(take):
        return lambda self, weights: take(self, [(name, tensor) for name, tensor in weights if part not in name])

    return [(WeightSyncExtension, "take_weights", wrap)]


def shift_rows_of_an_expert(place: str) -> list[Patch]:
    """Load one expert of a stack with each row in the place of the next.

    Args:
        place: the end of the stack's name.
    """
    from engines.vllm.worker import WeightSyncExtension

    def shift(stack):
        shifted = stack.clone()
        shifted[1] = stack[1].roll(1, 0)
        return shifted

    def wrap(take):
        return lambda self, weights: take(
            self, [(name, shift(tensor) if name.endswith(place) else tensor) for name, tensor in weights]
        )

    return [(WeightSyncExtension, "take_weights", wrap)]


def leave_packed(repack: str) -> list[Patch]:
    """Load weights, and let a CPU's kernel multiply with the copy that it packed of those before.

    Args:
        repack: function of ``engines.vllm.worker`` that makes the kernel pack weights again.
    """
    from engines.vllm import worker

    return [(worker, repack, lambda _: lambda model: None)]


def swap_names() -> list[Patch]:
    """Send two weights of one shape, each under the name of the other."""
    from engines import weight_sync

    def wrap(pack):
        def swap(parts):
            first, second = (f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1))
            names = {first: second, second: first}
            return pack([part._replace(name=names.get(part.name, part.name)) for part in parts])

        return swap

    return [(weight_sync, "_pack", wrap)]


def rotate_ranks_of_experts() -> list[Patch]:
    """Export the experts of each rank under the numbers of the next rank's."""
    from engines.megatron import weights

    def wrap(gather):
        def gather_rotated(weight, value):
            whole = gather(weight, value)
            return whole.roll(len(value), 0) if weight.cut.get(0) == "ep" else whole

        return gather_rotated

    return [(weights, "_unshard", wrap)]


def send_first_biases() -> list[Patch]:
    """Send biases of experts as the model's folder has them, since no optimizer has them."""
    from engines.megatron.engine import MegatronEngine
    from engines.models.safetensors_folder import SafetensorsFolder

    def wrap(export):
        def export_first_biases(self, everywhere=False):
            folder = SafetensorsFolder(self.model.folder)
            for name, tensor in export(self, everywhere):
                yield name, folder[name] if name.endswith("score_correction_bias") else tensor

        return export_first_biases

    return [(MegatronEngine, "export_weights", wrap)]


def lose_small_terms() -> list[Patch]:
    """Take vLLM's own log_softmax in the place of the platform's: of a large vocabulary it loses small terms."""
    import sys

    import torch
    from vllm.v1.sample.sampler import Sampler

    platforms = {sampler.__module__ for sampler in Sampler.__subclasses__()}
    return [
        (sys.modules[module], "compute_logprobs", lambda _: lambda logits: logits.log_softmax(-1, dtype=torch.float32))
        for module in platforms
    ]
