"""Parts that families of experts share: the mixture that a config describes, and its parameters."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engines.models.families.experts._joins import FusedExperts, StackedExperts
from engines.models.joins import GATED, Shape
from engines.models.layer import DecoderSizes, LayerKind
from engines.models.weight import Way, Weight
from engines.validation import fits
from hardware.megatron.mixture import Experts

NEEDED_OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob")
"""Keys that a config of Qwen's mixtures must have, beside the number of experts, which goes by two names."""
_CUT_OF_EXPERTS: dict[int, Way] = {0: "ep", 2: "etp"}
ExpertForm = Literal["each", "fused", "transposed"]
"""Form in which a folder has experts: a tensor of each expert and projection; one tensor of all gates and up
projections, ``[experts, 2 f, h]``, and one of all down projections, ``[experts, h, f]``; both with matrices
transposed."""


@dataclass(frozen=True)
class Mixture:
    """States the parameters of a layer's router, experts and shared expert, and the norm before them; a ``Piece``.

    Attributes:
        place: where a folder has them in a layer. names: a folder's names of gate, up and down projection.
        forms: forms in which folders have the experts, that of a folder without weights first.
        shared_place: where a folder has the shared expert in a layer.
    """

    experts: Experts
    place: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    forms: tuple[ExpertForm, ...] = ("each",)
    shared_place: str = "mlp.shared_expert"

    def __call__(self, model: DecoderSizes) -> tuple[Weight, ...]:
        hidden, gate = model.hidden, {f"{self.place}.gate.weight": (self.experts.count, model.hidden)}
        router = (
            Weight("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": (hidden,)}),
            Weight("mlp.router.weight", gate, module="mlp.gate.weight", part="router"),
        )
        if self.experts.has_bias:
            bias = {f"{self.place}.gate.e_score_correction_bias": (self.experts.count,)}
            router += (Weight("mlp.router.bias", bias, is_buffer=True, part="router"),)
        return router + self._state_experts(hidden) + (self._state_shared(hidden) if self.experts.shared else ())

    def _state_experts(self, hidden: int) -> tuple[Weight, ...]:
        stated = [self._state_form(form, hidden) for form in self.forms]
        return tuple(replace(first, other_forms=tuple(others)) for first, *others in zip(*stated))

    def _state_form(self, form: ExpertForm, hidden: int) -> tuple[Weight, Weight]:
        """State the experts' gates and up projections, and their down projections, as folders of a form have them."""
        count, ffn, (*halves, down) = self.experts.count, self.experts.ffn, self.names
        gated: dict[str, Shape]
        downs: dict[str, Shape]
        if form == "each":
            places = [f"{self.place}.experts.{number}" for number in range(count)]
            gated = {f"{place}.{name}.weight": (ffn, hidden) for place in places for name in halves}
            downs = {f"{place}.{down}.weight": (hidden, ffn) for place in places}
            joins = StackedExperts(projections=2), StackedExperts()
        else:
            is_transposed = form == "transposed"
            sides = {"gate_up_proj": (2 * ffn, hidden), down: (hidden, ffn)}
            fused = {
                f"{self.place}.experts.{name}": (count, *(reversed(side) if is_transposed else side))
                for name, side in sides.items()
            }
            gated, downs = ({name: shape} for name, shape in fused.items())
            joins = FusedExperts(projections=2, transposed=is_transposed), FusedExperts(transposed=is_transposed)
        return (
            Weight("mlp.experts.weight1", gated, joins[0], _CUT_OF_EXPERTS, module="mlp.experts.gate_up_proj"),
            Weight("mlp.experts.weight2", downs, joins[1], _CUT_OF_EXPERTS, module="mlp.experts.down_proj"),
        )

    def _state_shared(self, hidden: int) -> tuple[Weight, ...]:
        place, width, (*halves, down) = self.shared_place, self.experts.shared, self.names
        gated = {f"{place}.{name}.weight": (width, hidden) for name in halves}
        gate = (Weight("mlp.shared.gate_weight", {f"{place}_gate.weight": (1, hidden)}),)
        return (
            *(gate if self.experts.gates_shared else ()),
            Weight("mlp.shared.mlp.linear_fc1.weight", gated, GATED, {0: "tp"}),
            Weight("mlp.shared.mlp.linear_fc2.weight", {f"{place}.{down}.weight": (hidden, width)}, cut={1: "tp"}),
        )


def read_experts(config: dict, path: Path) -> Experts:
    """Read the mixture of a config in Qwen's form; ValueError for a number that is missing, of another type or too
    large."""
    counts = [config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None]
    if not counts or counts[0] != counts[-1]:
        raise ValueError(
            f"model: {path} has num_experts {config.get('num_experts')!r} and num_local_experts "
            f"{config.get('num_local_experts')!r}, expected one number of experts; save the model again"
        )
    count, chosen, ffn = counts[0], config["num_experts_per_tok"], config["moe_intermediate_size"]
    shared = config.get("shared_expert_intermediate_size", 0)
    for name, value, most in (
        ("num_experts", count, None),
        ("num_experts_per_tok", chosen, count),
        ("moe_intermediate_size", ffn, None),
        *([("shared_expert_intermediate_size", shared, None)] if shared != 0 else []),
    ):
        if not fits(int, value) or value < 1 or (most is not None and value > most):
            rule = "of at least 1" if most is None else f"from 1 to its {most} experts"
            raise ValueError(f"model: {path} has {name} {value!r}, expected a whole number {rule}")
    if not fits(bool, config["norm_topk_prob"]):
        raise ValueError(f"model: {path} has norm_topk_prob {config['norm_topk_prob']!r}, expected true or false")
    return Experts(count, chosen, ffn, config["norm_topk_prob"], shared)


def place_experts(config: dict, path: Path, kinds: tuple[LayerKind, ...], mixture: Mixture) -> tuple[LayerKind, ...]:
    """Place a mixture on every ``decoder_sparse_step``-th layer, but for ``mlp_only_layers``; ValueError where they say
    no such thing, or no layer has it."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not fits(int, step) or step < 1 or not fits(list[int], dense):
        raise ValueError(
            f"model: {path} has decoder_sparse_step {step!r} and mlp_only_layers {dense!r}, expected a whole number "
            "of at least 1 and numbers of layers"
        )
    sparse = [(number + 1) % step == 0 and number not in dense for number in range(len(kinds))]
    if not any(sparse):
        raise ValueError(f"model: {path} has experts in no layer, expected some; lower decoder_sparse_step")
    change = lambda kind: replace(kind, mlp=(mixture,), options=replace(kind.options, experts=mixture.experts))  # noqa: E731
    return tuple(change(kind) if has else kind for kind, has in zip(kinds, sparse, strict=True))
