"""Known faults, planted into the code of production, so that a check can show that it finds them.

Each fault is one that some system of the field has had. ``plant`` puts it into this process and ``mend`` removes it;
both are called in the process of a training rank or a rollout engine. Wrong masks are planted where the platform under
check lowers a rule (``Platform.list_faults``).
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal
from unittest.mock import patch

from engines.models.spec import ModelSpec
from engines.probes import expert_faults, form_faults, sharing_faults
from hardware.attention.cell import Patch
from hardware.attention.faults import ATTENTION_FAULTS, SHARING_FAULTS
from hardware.platform import Platform


@dataclass(frozen=True)
class Fault:
    """A known fault, and where it can be planted and found.

    Attributes:
        patches: makes the patches when the fault is planted, since that imports the patched modules; None if the
            platform has them.
        where: kind of process to plant it in. cp: context-parallel size at which it shows.
        model: HuggingFace model_type of a tiny model on which it shows.
        found_by: the check that must find it; other checks may find it too.
    """

    patches: Callable[[], list[Patch]] | None
    found_by: str
    where: Literal["actor", "rollouts"] = "actor"
    cp: int = 1
    model: str = "qwen2"


_PLANTED = ExitStack()


def plant(engine, name: str) -> None:
    """Put a fault of ``FAULTS`` or ``REAL_FAULTS`` into this process.

    Raises:
        ValueError: it is a fault of masks, and the engine's platform has no place for it.
    """
    make = (FAULTS | REAL_FAULTS)[name].patches
    for owner, attribute, wrap in make() if make else collect_faults(engine.platform)[name]:
        _PLANTED.enter_context(patch.object(owner, attribute, wrap(getattr(owner, attribute))))


def mend(_engine) -> None:
    """Remove all faults that were planted in this process."""
    _PLANTED.close()


def collect_faults(platform: Platform) -> dict[str, list[Patch]]:
    """Return ``Platform.list_faults`` of a platform, after a check that it is complete.

    Raises:
        ValueError: it lacks a fault of ``ATTENTION_FAULTS``, or has another fault.
    """
    faults = platform.list_faults()
    if lacking := [name for name in ATTENTION_FAULTS if not faults.get(name)]:
        raise ValueError(
            f"platform: {platform.name!r} has no place for the planted faults {lacking}, so that no check shows that "
            "it would find them there; name places or patches for them in its list_faults()"
        )
    if unknown := sorted(faults.keys() - set(ATTENTION_FAULTS)):
        raise ValueError(
            f"platform: {platform.name!r} has faults {unknown} that nobody plants, expected {list(ATTENTION_FAULTS)}; "
            "rename them in its list_faults(), or add them to hardware/attention/faults.py for every platform"
        )
    return faults


# -- places


def _chunks_swapped() -> list[Patch]:
    from engines.megatron import layout

    def wrap(map_slots):
        return lambda spec: map_slots(replace(spec, cp_rank=spec.cp - 1 - spec.cp_rank))

    return [(layout, "_map_slots", wrap)]


def _wrong_positions() -> list[Patch]:
    import torch

    from engines.megatron.rotary import Rotary

    def wrap(call):
        # This rank's slots are counted from 0. Without context parallelism that is no fault: distances stay right.
        return lambda self, position, dtype: call(self, torch.arange(position.numel()).view_as(position), dtype)

    return [(Rotary, "__call__", wrap)]


def _rotary_base_doubled() -> list[Patch]:
    import copy

    import torch

    from engines.megatron.rotary import Rotary

    def wrap(call):
        def turn_slower(self, position, dtype):
            slower, frequencies = copy.copy(self), self.inverse_frequency
            steps = torch.arange(frequencies.shape[-1], device=frequencies.device) / frequencies.shape[-1]
            slower.inverse_frequency = frequencies * 2.0**-steps
            return call(slower, position, dtype)

        return turn_slower

    return [(Rotary, "__call__", wrap)]


def _pad_marked_valid() -> list[Patch]:
    import torch

    from engines.megatron.layout import Layout

    def wrap(gather):
        def gather_a_pad(self, local):
            free = (~self.valid.flatten()).nonzero()[:, 0]
            slots = torch.cat([self.slots[:-1], free[:1]]) if len(free) else self.slots
            return gather(replace(self, slots=slots), local)

        return gather_a_pad

    return [(Layout, "gather_slots", wrap)]


def _label_of_a_neighbour() -> list[Patch]:
    from engines.megatron.engine import MegatronEngine

    def wrap(outputs):
        def take_next_label_in_pack(self, hidden, micro, layout):
            targets = layout.unpack(layout.pack(micro.inputs).flatten().roll(-1).view(layout.shape))
            return outputs(self, hidden, replace(micro, targets=targets), layout)

        return take_next_label_in_pack

    return [(MegatronEngine, "outputs", wrap)]


def _column_shifted() -> list[Patch]:
    from engines.batch.shard import Shard

    def wrap(cut):
        def cut_shifted_advantages(self):
            if self.batch.advantages is None:
                return cut(self)
            return cut(replace(self, batch=replace(self.batch, advantages=self.batch.advantages.roll(1))))

        return cut_shifted_advantages

    return [(Shard, "micro_batches", wrap)]


def _layer_computes_otherwise() -> list[Patch]:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    def wrap(forward):
        def amplify_layer_3(self, *args, **kwargs):
            hidden, context = forward(self, *args, **kwargs)
            return (1.01 * hidden if self.layer_number == 3 else hidden), context

        return amplify_layer_3

    return [(TransformerLayer, "forward", wrap)]


# -- images


def _features_one_row_off() -> list[Patch]:
    from engines.megatron.vision.embedding import Vision

    def wrap(places):
        def shift_rows(self, rows, layout):
            slots, image_rows = places(self, rows, layout)
            return slots, image_rows.roll(1)

        return shift_rows

    return [(Vision, "_places", wrap)]


def _one_window_over_all_images() -> list[Patch]:
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    def wrap(seqlens):
        def merge_windows(*args, **kwargs):
            ends, _ = seqlens(*args, **kwargs)
            return ends[[0, -1]], int(ends[-1])

        return merge_windows

    return [(modeling_qwen3_vl, "get_vision_attention_seqlens", wrap)]


def _positions_of_the_neighbour() -> list[Patch]:
    from engines.megatron.engine import MegatronEngine

    def wrap(forward):
        def take_previous_positions(self, module, micro, *further):
            return forward(self, module, replace(micro, positions=micro.positions.roll(1, 0)), *further)

        return take_previous_positions

    return [(MegatronEngine, "forward_micro_batch", wrap)]


# -- gradients and weights


def _backward_drops_a_rank() -> list[Patch]:
    from hardware.collectives import _GatherRanks

    def wrap(_):
        return staticmethod(lambda ctx, gradient: (gradient[ctx.group.rank()].contiguous(), None))

    return [(_GatherRanks, "backward", wrap)]


def _stale_weights() -> list[Patch]:
    from engines.vllm.worker import WeightSyncExtension

    def wrap(take):
        def skip_second_layer(self, weights):
            return take(self, [(name, tensor) for name, tensor in weights if ".layers.1." not in name])

        return skip_second_layer

    return [(WeightSyncExtension, "take_weights", wrap)]


def _all_weights_stale() -> list[Patch]:
    from engines.vllm.worker import WeightSyncExtension

    return [(WeightSyncExtension, "take_weights", lambda _: lambda self, weights: None)]


def _small_terms_lost() -> list[Patch]:
    import sys

    import torch
    from vllm.v1.sample.sampler import Sampler

    # vLLM's own function instead of the platform's: it loses small terms of a large vocabulary
    platforms = {sampler.__module__ for sampler in Sampler.__subclasses__()}
    return [
        (sys.modules[module], "compute_logprobs", lambda _: lambda logits: logits.log_softmax(-1, dtype=torch.float32))
        for module in platforms
    ]


def _tied_head_left_behind() -> list[Patch]:
    from engines.vllm import worker

    return [(worker, "_repack_tied_heads", lambda _: lambda model: None)]


def _swapped_names() -> list[Patch]:
    from engines import weight_sync

    def wrap(pack):
        def swap_names(parts):
            first, second = (f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1))
            names = {first: second, second: first}
            return pack([part._replace(name=names.get(part.name, part.name)) for part in parts])

        return swap_names

    return [(weight_sync, "_pack", wrap)]


FAULTS: dict[str, Fault] = {
    # Sequences that begin alike are in the batch whose outputs are compared, not among those of a mask's probe.
    **{name: Fault(None, "layouts" if name in SHARING_FAULTS else "attention") for name in ATTENTION_FAULTS},
    "own positions from 0": Fault(sharing_faults.count_own_positions_from_0, "layouts"),
    "one target for all samples": Fault(sharing_faults.score_one_target_for_all, "layouts"),
    "the gradient of one reader": Fault(sharing_faults.take_the_gradient_of_one_reader, "gradients"),
    "a pad marked valid": Fault(_pad_marked_valid, "layouts"),
    "the label of a neighbour": Fault(_label_of_a_neighbour, "layouts"),
    "a layer that computes otherwise": Fault(_layer_computes_otherwise, "layouts"),
    "a column shifted": Fault(_column_shifted, "gradients"),
    "stale weights": Fault(_stale_weights, "weight sync", where="rollouts"),
    "a tied head left behind": Fault(_tied_head_left_behind, "weight sync", where="rollouts"),
    "two names swapped on the way": Fault(_swapped_names, "weight sync"),
    "rotation from the wrong positions": Fault(_wrong_positions, "layouts", cp=2),
    "context-parallel chunks swapped": Fault(_chunks_swapped, "attention", cp=2),
    "one window over all images": Fault(_one_window_over_all_images, "images", model="qwen3_vl"),
    "features one row off": Fault(_features_one_row_off, "layouts", model="qwen3_vl"),
    "positions of the neighbour": Fault(_positions_of_the_neighbour, "layouts", model="qwen3_vl"),
    **{
        name: Fault(patches, "layouts", model="gemma3")
        for name, patches in {
            "rotary kinds swapped": form_faults.swap_rotary_kinds,
            "a norm without its one": form_faults.leave_out_the_one,
            "post norms left out": form_faults.leave_out_post_norms,
            "scores scaled by the head's size": form_faults.scale_by_head_size,
            "features scaled like text": form_faults.scale_features,
            "images on the wrong layers": form_faults.see_images_on_some_layers,
            "image block off by one": form_faults.shift_image_block,
        }.items()
    },
    **{
        name: Fault(patches, "gradients" if "gradient" in name else "layouts", model="qwen3_moe")
        for name, patches in {
            "gate and up of experts swapped": expert_faults.swap_gate_and_up,
            "the next expert": expert_faults.take_the_next_expert,
            "chosen experts' weights not scaled": expert_faults.leave_weights_unscaled,
            "the last chosen expert dropped": expert_faults.drop_the_last_choice,
            "a router's gradient lost": expert_faults.lose_the_routers_gradient,
        }.items()
    },
    "a rollout that sees images causally": Fault(
        form_faults.see_images_causally, "rollout", where="rollouts", model="gemma3"
    ),
    "an image cut by a chunk": Fault(form_faults.cut_images, "rollout", where="rollouts", model="gemma3"),
    "a gather whose backward drops a rank": Fault(_backward_drops_a_rank, "gradients", cp=2),
}
"""Name of a fault -> fault."""

_LARGE_VOCAB = 200_000
"""Size of vocabulary from which on log_softmax's bias on a CPU exceeds the limit between rollout and trainer."""
REAL_FAULTS: dict[str, Fault] = {
    "a rotary base of twice the size": Fault(_rotary_base_doubled, "layouts"),
    "all weights stale": Fault(_all_weights_stale, "weight sync", where="rollouts"),
    "stale weights": FAULTS["stale weights"],
    "a tied head left behind": FAULTS["a tied head left behind"],
    "log_softmax of a large vocabulary": Fault(_small_terms_lost, "rollout", where="rollouts"),
}
"""Faults that show on a model of any family."""


def list_real_faults(model: ModelSpec) -> dict[str, Fault]:
    """Return the faults of ``REAL_FAULTS`` that a model can show, by name."""
    absent = set() if model.tied else {"a tied head left behind"}
    absent |= set() if model.vocab >= _LARGE_VOCAB else {"log_softmax of a large vocabulary"}
    return {name: fault for name, fault in REAL_FAULTS.items() if name not in absent}
