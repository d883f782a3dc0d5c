"""Known faults, planted into the code of production, so that a check can show that it finds them.

Each fault is one that some system of the field has had. ``plant`` puts it into this process and ``mend`` removes it;
both are called in the process of a training rank or a rollout engine. Wrong masks are planted where the platform under
check lowers a rule (``Platform.list_faults``).
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal
from unittest.mock import patch

from engines.models.spec import ModelSpec
from engines.probes.planted import adapter_faults, expert_faults, form_faults, sharing_faults, sync_faults
from hardware.attention.cell import Patch
from hardware.attention.faults import ATTENTION_FAULTS, SHARING_FAULTS
from hardware.platform import Platform
from hardware.vllm_versions import CAUSAL_FLAGS, CPU_EXPERTS, RETURNED_STATES, TIED_HEADS, Feature


@dataclass(frozen=True)
class Fault:
    """A known fault, and where it can be planted and found.

    Attributes:
        patches: makes the patches when the fault is planted, since that imports the patched modules; None if the
            platform has them.
        found_by: the check that must find it; other checks may find it too.
        where: kind of process to plant it in.
        spread: parallel size that is 2 where it is planted, of two ranks; empty plants it into one rank.
        model: HuggingFace model_type of a tiny model on which it shows.
        replays: whether it shows only under router replay, which not every platform has.
        backend: rollout backend whose code it patches; empty where vLLM has the code with every backend.
        feature: part of vLLM without which it cannot show; None if every version has what it needs.
    """

    patches: Callable[[], list[Patch]] | None
    found_by: str
    where: Literal["actor", "rollouts"] = "actor"
    spread: Literal["", "cp", "ep", "etp"] = ""
    model: str = "qwen2"
    replays: bool = False
    backend: str = ""
    feature: Feature | None = None

    def can_show(self, platform: Platform) -> bool:
        """Tell whether the fault can show on a platform: it has the code that the fault patches."""
        if self.feature and not self.feature.is_there:
            return False
        return (platform.records_routes or not self.replays) and self.backend in ("", *platform.rollout_backends)


_PLANTED = ExitStack()


def plant(engine, name: str) -> None:
    """Put a fault of ``FAULTS``, ``REAL_FAULTS`` or ``ADAPTER_FAULTS`` into this process.

    Raises:
        ValueError: it is a fault of masks, and the engine's platform has no place for it.
    """
    make = (FAULTS | REAL_FAULTS | ADAPTER_FAULTS)[name].patches
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
        return lambda self, module, micro, *further: forward(
            self, module, replace(micro, positions=micro.positions.roll(1, 0)), *further
        )

    return [(MegatronEngine, "forward_micro_batch", wrap)]


# -- gradients


def _backward_drops_a_rank() -> list[Patch]:
    from hardware.collectives import _GatherRanks

    def wrap(_):
        return staticmethod(lambda ctx, gradient: (gradient[ctx.group.rank()].contiguous(), None))

    return [(_GatherRanks, "backward", wrap)]


_late = partial(Fault, found_by="weight sync", where="rollouts")
_images = partial(
    Fault, found_by="rollout", where="rollouts", model="gemma3", backend="vllm_cpu_images", feature=CAUSAL_FLAGS
)
_mixture = partial(Fault, model="qwen2_moe", spread="ep")
_fused = partial(Fault, found_by="weight sync", model="qwen3_5_moe", spread="ep", feature=RETURNED_STATES)
_glm = partial(Fault, model="glm4_moe", spread="etp")
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
    "stale weights": _late(partial(sync_faults.leave_out, ".layers.1.")),
    "a tied head left behind": _late(partial(sync_faults.leave_packed, "_repack_tied_heads"), feature=TIED_HEADS),
    "two names swapped on the way": Fault(sync_faults.swap_names, "weight sync"),
    "rotation from the wrong positions": Fault(_wrong_positions, "layouts", spread="cp"),
    "context-parallel chunks swapped": Fault(_chunks_swapped, "attention", spread="cp"),
    "one window over all images": Fault(_one_window_over_all_images, "images", model="qwen3_vl"),
    "features one row off": Fault(_features_one_row_off, "layouts", model="qwen3_vl"),
    "positions of the neighbour": Fault(_positions_of_the_neighbour, "layouts", model="qwen3_vl"),
    **{
        name: Fault(patches, "layouts", model="gemma3", feature=CAUSAL_FLAGS)
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
        name: Fault(patches, "attention", model="qwen3_5_text")
        for name, patches in {
            "convolutions run on": form_faults.run_convolutions_on,
            "states run on": form_faults.run_states_on,
            "convolutions and states run on": form_faults.run_convolutions_and_states_on,
            "boundaries of states off by one": form_faults.begin_states_a_token_late,
        }.items()
    },
    "states of prompts forgotten": Fault(form_faults.forget_states_of_prompts, "layouts", model="qwen3_5_text"),
    "convolutions left out of a sync": _late(partial(sync_faults.leave_out, ".conv1d."), model="qwen3_5_text"),
    "gate and up of experts swapped": _mixture(expert_faults.swap_gate_and_up, "layouts"),
    **{
        name: _mixture(partial(expert_faults.choose_otherwise, choice), "layouts")
        for name, choice in expert_faults.CHOICES.items()
    },
    **{
        name: _mixture(partial(expert_faults.share_otherwise, forward), "layouts")
        for name, forward in expert_faults.SHARED.items()
    },
    "a router's gradient lost": _mixture(expert_faults.lose_the_routers_gradient, "gradients"),
    "experts' gradients summed over all ranks": _mixture(expert_faults.sum_over_all_ranks, "gradients"),
    "padding routed": _mixture(expert_faults.route_padding, "gradients"),
    "experts under the numbers of the next rank's": _mixture(sync_faults.rotate_ranks_of_experts, "weight sync"),
    "experts not packed again": _late(
        partial(sync_faults.leave_packed, "_forget_packed_experts"),
        model="qwen2_moe",
        spread="ep",
        feature=CPU_EXPERTS,
    ),
    "gate and up of fused experts exchanged": _fused(expert_faults.exchange_fused_gates),
    "rows of a fused expert shifted": _fused(
        partial(sync_faults.shift_rows_of_an_expert, "layers.1.mlp.experts.gate_up_proj"), where="rollouts"
    ),
    "routers left out of a sync": _late(partial(sync_faults.leave_out, ".mlp.gate."), model="qwen2_moe", spread="ep"),
    "routes of the token before": _mixture(partial(expert_faults.shift_routes, 0), "rollout", replays=True),
    "routes of the layer before": _mixture(partial(expert_faults.shift_routes, 1), "rollout", replays=True),
    "cached tokens without routes": _mixture(
        expert_faults.forget_routes_of_prompts, "rollout", where="rollouts", replays=True
    ),
    "gate and up of experts cut as one": _glm(expert_faults.cut_gate_and_up_as_one, "layouts"),
    "a choice of experts without its bias": _glm(expert_faults.choose_without_bias, "layouts"),
    "biases of experts left out of a sync": _glm(sync_faults.send_first_biases, "weight sync"),
    "a rollout that sees images causally": _images(form_faults.see_images_causally),
    "an image cut by a chunk": _images(form_faults.cut_images),
    "a gather whose backward drops a rank": Fault(_backward_drops_a_rank, "gradients", spread="cp"),
}
"""Name of a fault -> fault."""

_LARGE_VOCAB = 200_000
"""Size of vocabulary from which on log_softmax's bias on a CPU exceeds the limit between rollout and trainer."""
REAL_FAULTS: dict[str, Fault] = {
    "a rotary base of twice the size": Fault(_rotary_base_doubled, "layouts"),
    "all weights stale": _late(partial(sync_faults.leave_out, "")),
    "stale weights": FAULTS["stale weights"],
    "a tied head left behind": FAULTS["a tied head left behind"],
    "log_softmax of a large vocabulary": Fault(
        sync_faults.lose_small_terms, "rollout", where="rollouts", backend="vllm_cpu"
    ),
}
"""Faults that show on a model of any family."""
ADAPTER_FAULTS: dict[str, Fault] = {
    "frozen weights": Fault(adapter_faults.send_frozen_weights, "weight sync"),
    "adapters without their scale": Fault(adapter_faults.leave_unscaled, "layouts"),
    "the A of a neighbour": Fault(adapter_faults.take_the_a_of_a_neighbour, "layouts"),
}
"""Faults that show on a model of any family, with adapters."""


def list_real_faults(model: ModelSpec) -> dict[str, Fault]:
    """Return the faults of ``REAL_FAULTS`` that a model can show, by name."""
    absent = set() if model.tied else {"a tied head left behind"}
    absent |= set() if model.vocab >= _LARGE_VOCAB else {"log_softmax of a large vocabulary"}
    return {name: fault for name, fault in REAL_FAULTS.items() if name not in absent}
