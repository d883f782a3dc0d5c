"""Known faults of options by which families differ: norms, scales, rotary kinds, and images that are seen both ways."""

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
    """Multiply by a norm's weight alone, without the 1 that it is added to."""
    from torch.nn.functional import rms_norm

    from hardware.megatron.layers import NormFromOne

    return [(NormFromOne, "forward", lambda _: lambda self, x: rms_norm(x, x.shape[-1:], self.weight, self.eps))]


def leave_out_post_norms() -> list[Patch]:
    """Add outputs of attention and MLP to the residual stream without their norms."""
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
    """Give each input the kind of the one before it: an image's first token is then text, and the text after it
    image."""
    return _build_masks(lambda rules, image_block: (rules, image_block.roll(1)))


def see_images_causally() -> list[Patch]:
    """Tell vLLM's attention of no image, as it does by itself on a CPU."""
    return _tell_images(lambda images: [])


def cut_images() -> list[Patch]:
    """Tell vLLM's attention of both halves of an image as two, as a chunk of a prompt would cut it."""
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
