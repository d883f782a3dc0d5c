"""Known faults in the options of a family: norms, scales, rotary kinds, bidirectional images, states."""

import math
from collections.abc import Callable
from dataclasses import replace

from hardware.attention.cell import Patch


def swap_rotary_kinds() -> list[Patch]:
    """Rotate each kind of layer by the other's base."""
    from hardware.megatron.layers import CoreAttention

    return [(CoreAttention, "forward", _with(rotary_kind=lambda layer: 1 - layer.rotary_kind))]


def scale_by_head_size() -> list[Patch]:
    """Scale scores by 1 / sqrt(head_dim), where the model has a scale of its own."""
    from hardware.megatron.layers import CoreAttention

    scale = lambda layer: 1 / math.sqrt(layer.config.kv_channels)  # noqa: E731
    return [(CoreAttention, "forward", _with(softmax_scale=scale))]


def leave_out_the_one() -> list[Patch]:
    """Scale a norm by its weight instead of 1 + weight."""
    from torch.nn.functional import rms_norm

    from hardware.megatron.layers import NormFromOne

    return [(NormFromOne, "forward", lambda _: lambda self, x: rms_norm(x, x.shape[-1:], self.weight, self.eps))]


def leave_out_post_norms() -> list[Patch]:
    """Add the outputs of attention and the MLP to the residual stream without their norms."""
    from hardware.megatron.layers import NormedAdd

    return [(NormedAdd, "_add", lambda _: lambda self, output, residual, dropout: residual + output[0])]


def scale_features() -> list[Patch]:
    """Multiply features of images as embeddings of text are."""
    from engines.megatron.vision.embedding import Vision

    def wrap(features):
        return lambda self, *args: features(self, *args) * math.sqrt(self.spec.out)

    return [(Vision, "_features", wrap)]


def see_images_on_some_layers() -> list[Patch]:
    """See images both ways on layers with a window alone, as Gemma 4 does."""
    return _build_masks(
        lambda rules, image_block: (
            tuple(replace(rule, images=rule.images and rule.window is not None) for rule in rules),
            image_block,
        )
    )


def shift_image_block() -> list[Patch]:
    """Shift the image block by one input: an image's first token counts as text, and the text after it as image."""
    return _build_masks(lambda rules, image_block: (rules, image_block.roll(1)))


def see_images_causally() -> list[Patch]:
    """Pass no image to vLLM's attention, which then computes as vLLM does by itself on a CPU."""
    return _tell_images(lambda images: [])


def cut_images() -> list[Patch]:
    """Pass the halves of an image to vLLM's attention as two images, as chunked prefill would cut it."""
    halves = lambda first, last: [(first, (first + last) // 2), ((first + last) // 2 + 1, last)]  # noqa: E731
    return _tell_images(lambda images: [half for image in images for half in halves(*image)])


def _build_masks(change: Callable) -> list[Patch]:
    from engines.megatron.layout import Layout

    def wrap(build):
        return lambda self, rules, image_block, *args: build(self, *change(rules, image_block), *args)

    return [(Layout, "build_mask_spec", wrap)]


def _with(**attributes: Callable) -> Callable:
    """Wrap a method so that the object has other attributes while it runs."""

    def wrap(method):
        def run(self, *args, **kwargs):
            kept = {name: getattr(self, name) for name in attributes}
            for name, change in attributes.items():
                setattr(self, name, change(self))
            try:
                return method(self, *args, **kwargs)
            finally:
                for name, value in kept.items():
                    setattr(self, name, value)

        return run

    return wrap


def _tell_images(change: Callable[[list], list]) -> list[Patch]:
    from vllm.v1.worker import gpu_model_runner

    def wrap(metadata):
        def build(*args, mm_req_doc_ranges=None, **kwargs):
            if mm_req_doc_ranges is not None:
                mm_req_doc_ranges = {request: change(images) for request, images in mm_req_doc_ranges.items()}
            return metadata(*args, mm_req_doc_ranges=mm_req_doc_ranges, **kwargs)

        return build

    return [(gpu_model_runner, "CommonAttentionMetadata", wrap)]


def run_convolutions_on() -> list[Patch]:
    """Let a convolution read the slots before a sequence's first, which are another sequence's."""
    import torch

    from hardware.attention.delta_rule import TAIL, DeltaPlan

    def wrap(cut):
        def run_on(plan, rows):
            slots = plan.slots.clone()
            for _ in range(TAIL):  # from a first token back, where no slot is
                begins = (slots[:, :-1] == len(rows)) & (slots[:, 1:] < len(rows))
                slots[:, :-1] = torch.where(begins, (slots[:, 1:] - 1).clamp(min=0), slots[:, :-1])
            return cut(replace(plan, slots=slots), rows)

        return run_on

    return [(DeltaPlan, "cut", wrap)]


def run_states_on() -> list[Patch]:
    """Begin each sequence with the state after the one before it."""
    from hardware.attention import delta_rule

    def wrap(cut):
        return lambda spec: [(*run[:3], number - 1) for number, run in enumerate(cut(spec))]

    return [(delta_rule, "cut_runs", wrap)]


def run_convolutions_and_states_on() -> list[Patch]:
    """Let neither begin anew, as transformers (5.19) does where it is given the sequences of a pack."""
    return run_convolutions_on() + run_states_on()


def begin_states_a_token_late() -> list[Patch]:
    """Carry a state on to the first token of the next sequence, and begin anew after it."""
    from hardware.attention import delta_rule

    def wrap(cut):
        def cut_late(spec):
            runs: list[tuple[int, int, int, int]] = []
            for number, start, end, parent in cut(spec):
                if spec.sharing:
                    runs.append((number, start, end, parent))
                    continue
                runs.append((number, 0, 1, len(runs) - 1))
                if end > 1:
                    runs.append((number, 1, end, -1))
            return runs

        return cut_late

    return [(delta_rule, "cut_runs", wrap)]


def forget_states_of_prompts() -> list[Patch]:
    """Begin the tokens after a shared prompt with an empty state."""
    from hardware.attention import delta_rule

    def wrap(cut):
        return lambda spec: [(*run[:3], -1 if spec.begins[run[0]] == run[1] else run[3]) for run in cut(spec)]

    return [(delta_rule, "cut_runs", wrap)]
