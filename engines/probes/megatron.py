"""Probes of a rank of the training engine: the influence of tokens on each other, hidden states, gradients.

Every function is collective over the ranks of an engine. The probes use the engine's own layout, attention inputs and
schedule, so they show the computation of training. They change inputs and compare outputs bit by bit: a masked token is
multiplied by an exact zero, so it changes no bit.
"""

from collections.abc import Collection
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.samples import Image
from engines.batch.shard import TokenOutputs
from engines.interfaces import LossFn
from engines.megatron.engine import MegatronEngine
from engines.megatron.extensions.adapters import Adapters
from engines.megatron.weights import export_weights, load_weights
from engines.probes.case import Influence, ProbeCase
from engines.probes.head import scoring_some
from engines.probes.mixing import LOUD, Mixing, list_layers
from engines.probes.outputs import changing_settings, compute_outputs, plan_batch
from engines.probes.states import watching_states
from hardware.attention.rules import Rule
from hardware.megatron.experts import sum_load

_PASS_SLOTS = 2**14
"""Tokens that one pass takes at most."""
_BIAS_STEP = 0.1
"""How far ``step_biases`` moves the bias of an expert: of scores from 0 to 1 so far that tokens choose others."""


# -- one layer's attention


def probe_attention(
    engine: MegatronEngine, kind: str, rule: Rule, case: ProbeCase, every: bool = True
) -> list[Influence]:
    """Compare core attention, or for a rule with a state what carries it, of each layer on this rank with the rule, and
    return the differences; empty if there are none.

    A forward pass over copies of the sequences, each with the inputs of another token changed, is compared with a pass
    over unchanged copies. A pass over one copy is compared with a pass with other padding.

    Args:
        every: whether to probe each layer; else only the first and the last.
    """
    layers, visible = list_layers(engine, rule, every), case.compute_visible(rule)[:, list(case.columns)]
    heard_by_layer: dict[Any, list[np.ndarray]] = {}
    for part in case.passes(_PASS_SLOTS, engine.platform.max_pack_sequences):
        repeated = part.repeated()
        mixing = _mixing(engine, kind, rule, repeated)
        baseline, changed = mixing.draw(), mixing.draw(repeated.changed)
        for layer in layers:
            effects = _changes(mixing.mix(layer, baseline), mixing.mix(layer, changed), len(part.columns)).T
            heard_by_layer.setdefault(layer, []).append(effects)
    influences, mixing = [], _mixing(engine, kind, rule, case)
    baseline, padded = mixing.draw(), mixing.draw(padding=LOUD)
    for layer, passes in heard_by_layer.items():
        effects = np.concatenate(passes, axis=1)
        pads = int(_changes(mixing.mix(layer, baseline), mixing.mix(layer, padded), 1).sum())
        if pads or (effects != visible).any():
            influences.append(_explain(engine, layer, kind, rule, case, effects, pads))
    return influences


def _mixing(engine: MegatronEngine, kind: str, rule: Rule, case: ProbeCase) -> Mixing:
    """Lay out a case's tokens and lower a rule to the platform's attention inputs."""
    with changing_settings(engine, layout=kind, **_padded(engine)):
        layout = engine.layout(case.lengths)
    spec = layout.build_mask_spec((rule,), torch.tensor(case.image_block), case.prefixes)
    positions = layout.pack(_axes(engine, torch.from_numpy(case.place()[1])).to(engine.device))
    rotary = engine.rotary(positions, engine.transformer.params_dtype)
    inputs = engine.platform.build_attention_inputs(spec, rotary, engine.config.attention_override)
    return Mixing(engine, layout, inputs, rule)


def _explain(
    engine: MegatronEngine, layer, kind: str, rule: Rule, case: ProbeCase, effects: np.ndarray, pads: int
) -> Influence:
    """Probe once more, one token at a time in a single copy, so that every leak has a source.

    A fault that takes several copies to show is told by its ``effects`` there.
    """
    mixing = _mixing(engine, kind, rule, case)
    visible, before = case.compute_visible(rule)[:, list(case.columns)], mixing.mix(layer, mixing.draw())
    single = np.concatenate([_changes(before, mixing.mix(layer, mixing.draw((j,))), 1) for j in case.columns]).T
    heard = single if (single != visible).any() else effects
    return case.judge(layer.layer_number, heard, visible, visible, pads)


# -- the whole model


def probe_tokens(
    engine: MegatronEngine, kind: str, rules: tuple[Rule, ...], case: ProbeCase, leak_limit: float = 0.0
) -> list[Influence]:
    """Compare the influence between tokens through the whole model with the rules of its layers together.

    Influence is allowed along any path through the layers' rules. It is required where a single layer's rule allows it;
    an influence by way of many tokens may be below the last bit.

    Args:
        leak_limit: change of a logprob or an entropy, in nats, from which on an influence that is not allowed is a
            leak. In a model with experts another token's route changes the place of a token among an expert's rows, and
            some processors round a product by its place. At 0 every changed bit is one.
    """
    columns, visible = list(case.columns), {rule: case.compute_visible(rule) for rule in set(rules)}
    reach = np.eye(sum(case.lengths), dtype=np.float32)  # [N, N]: i is reached by j through the layers so far
    for layer in range(engine.model.layers):
        step = visible[rules[0] if len(rules) == 1 else rules[layer]] | np.eye(len(reach), dtype=bool)
        reach = (step.astype(np.float32) @ reach > 0).astype(np.float32)
    required = np.logical_or.reduce(list(visible.values()))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, engine.model.vocab - 1, (sum(case.lengths),), generator=generator)
    effects, beyond_limit, unchanged = [], [], {}
    for part in case.passes(_PASS_SLOTS, engine.platform.max_pack_sequences):
        repeated, copies = part.repeated(), len(part.columns)
        baseline = ids.repeat(copies)
        changed = baseline.index_add(0, torch.tensor(repeated.changed), torch.ones(copies, dtype=torch.long))
        if copies not in unchanged:
            unchanged[copies] = _predictions(engine, kind, repeated, baseline)
        before, after = unchanged[copies], _predictions(engine, kind, repeated, changed)
        if before is not None and after is not None:
            effects.append(_changes(before, after, copies).T)
            beyond_limit.append(_changes(before, after, copies, leak_limit).T)
    before = _predictions(engine, kind, case, ids)
    with patch.object(engine, "pad_id", engine.model.vocab - 1):
        padded = _predictions(engine, kind, case, ids)
    if before is None or padded is None:
        return []
    pads = int(_changes(before, padded, 1, leak_limit).sum())
    allowed = reach[:, columns] > 0
    heard = np.where(allowed, np.concatenate(effects, axis=1), np.concatenate(beyond_limit, axis=1))
    influence = case.judge(0, heard, allowed, required[:, columns], pads)
    return [influence] if influence.leaks or influence.missing else []


@torch.no_grad()
def probe_tower(engine: MegatronEngine, images: list[Image], others: list[Image]) -> int:
    """Count images whose features change with the other images in the vision tower; 0 on later stages.

    Args:
        others: for each image another image of its size.
    """
    if "vision" not in engine.extensions:
        return 0
    merge, count = engine.extensions["vision"].spec.merge, 0
    before, stops = engine.extensions["vision"].see(images), np.cumsum([image.tokens(merge) for image in images])
    for number, stop in enumerate(stops):
        neighbours = [image if place == number else others[place] for place, image in enumerate(images)]
        tokens = slice(stop - images[number].tokens(merge), stop)
        count += not torch.equal(before[tokens], engine.extensions["vision"].see(neighbours)[tokens])
    return count


def _predictions(engine: MegatronEngine, kind: str, case: ProbeCase, ids: Tensor) -> Tensor | None:
    """Compute ``[N, 2]``: at every token, the logprob of a target that is always the same, and the entropy; by
    ``scoring_some``."""
    batch = TrainBatch(
        case.lengths,
        ids,
        _axes(engine, torch.from_numpy(case.place()[1])),
        torch.zeros_like(ids),
        torch.ones(len(ids), dtype=torch.bool),
        torch.tensor(case.image_block),
    )
    # Image tokens are embedded as text is: there are no images.
    as_text = patch.object(engine, "extensions", engine.extensions.leave_out("vision"))
    # Copies begin alike until a token is changed: with what they share, their numbers would change too.
    settings = {"micro_batch_tokens": 10**9, "share": "none"} | _padded(engine)
    with changing_settings(engine, **settings), as_text, scoring_some(engine):
        outputs = compute_outputs(engine, kind, batch)
    return None if outputs is None else torch.stack([outputs.logprobs, outputs.entropy], dim=1)


# -- numbers to compare


@torch.no_grad()
def compute_merged(engine: MegatronEngine, kind: str, batch: TrainBatch) -> TokenOutputs | None:
    """Compute outputs as ``compute_outputs`` does, with adapters merged into the weights of an engine that has some."""
    adapters = cast(Adapters, engine.extensions["adapters"])
    for parameter in engine.decoder.parameters():
        parameter.copy_(engine.extensions.merge(parameter))
    with adapters.switched_off():
        outputs = compute_outputs(engine, kind, batch)
    restore_weights(engine)
    return outputs


def hidden_states(engine: MegatronEngine, kind: str, batch: TrainBatch) -> dict[int, Tensor]:
    """Return the output of each layer of this rank's stage: layer number -> ``[N, hidden]`` float32.

    On the first stage number 0 is the input of the first layer: embeddings, with features of images.
    """
    layouts, states = [], {}
    build = engine.layout

    def layout(lengths, sharing=None, scored=None):
        layouts.append(build(lengths, sharing, scored))
        return layouts[-1]

    def keep(number: int, hidden: Tensor) -> None:  # [s / tp, b, h]
        if number > engine.model.layers:  # after the last norm
            return
        if engine.transformer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        flat = layouts[-1].unpack(hidden.transpose(0, 1), mpu.get_context_parallel_group())
        states.setdefault(number, []).append(flat.float().cpu())

    with watching_states(engine, keep), patch.object(engine, "layout", layout):
        compute_outputs(engine, kind, batch)
    with changing_settings(engine, layout=kind):
        schedule = plan_batch(engine, batch, 1)
    return {number: schedule.restore_order(torch.cat(parts)) for number, parts in states.items()}


def take_gradients(engine: MegatronEngine, kind: str, batch: TrainBatch, loss: LossFn, denominator: float) -> float:
    """Compute the gradient of ``sum(loss) / denominator`` into the buffers of every rank, reduced over all replicas.

    It returns this rank's part of the squared norm, which the parts of all ranks add up to. ``batch`` is that of all
    replicas, each takes its share.
    """
    with changing_settings(engine, layout=kind):
        schedule = plan_batch(engine, batch, engine.dp_size)
        engine.backward(schedule.shards(batch)[engine.dp_rank], loss, denominator)
    _gather_buffers(engine)
    dense = engine.config.dp * engine.config.cp  # ranks that hold the same parameter, by its group of reduction
    experts = cast(dist.ProcessGroup, mpu.get_expert_data_parallel_group()).size()
    held = _list_gradients(engine)
    return sum(float(g.norm()) ** 2 / (dense if getattr(p, "allreduce", True) else experts) for p, g in held)


def count_routed(engine: MegatronEngine, kind: str, batch: TrainBatch) -> tuple[int, list[int]]:
    """Count the tokens that the last ``take_gradients`` computed, and in each layer of experts of this rank's stage
    those that chose experts."""
    with changing_settings(engine, layout=kind):
        computed = plan_batch(engine, batch, engine.dp_size).count_computed()
    routers = engine.extensions["experts"].routers.layers if "experts" in engine.extensions else []
    return computed, (sum_load(routers).sum(dim=1) // routers[0].mixture.chosen).tolist() if routers else []


def read_gradients(engine: MegatronEngine, names: Collection[str]) -> dict[str, Tensor]:
    """Return the named gradients in the buffers: HF name -> whole tensor, on the first replica's leader."""
    gradients = (
        gather_adapter_gradients(engine, names) if "adapters" in engine.extensions else gather_gradients(engine, names)
    )
    return gradients if engine.is_leader and engine.dp_rank == 0 else {}


def gather_gradients(engine: MegatronEngine, names: Collection[str] = ()) -> dict[str, Tensor]:
    """Return gradients of the last backward pass, reduced over all replicas: HF name -> whole tensor on every rank.

    Args:
        names: weights whose gradients to gather; empty gathers all.
    """
    _gather_buffers(engine)
    gradient = lambda p: p.main_grad if p.requires_grad else torch.zeros_like(p)  # noqa: E731 (a frozen one has none)
    exported, buffers = export_weights(engine.decoder, engine.model, gradient), engine.model.buffers
    return {n: g.clone().cpu() for n, g in exported if n not in buffers and (not names or n in names)}


def gather_adapter_gradients(engine: MegatronEngine, names: Collection[str] = ()) -> dict[str, Tensor]:
    """Return gradients of adapters as ``gather_gradients`` does, by PEFT's names; empty without adapters."""
    _gather_buffers(engine)
    exported = (
        engine.extensions["adapters"].export(lambda parameter: parameter.main_grad)
        if "adapters" in engine.extensions
        else ()
    )
    return {name: gradient.clone().cpu() for name, gradient in exported if not names or name in names}


def _list_gradients(engine: MegatronEngine) -> list[tuple[Tensor, Tensor]]:
    """List the parameters of this rank that learn, each with its gradient in the buffers."""
    return [(p, cast(Any, p).main_grad) for p in engine.module.parameters() if p.requires_grad]


def _gather_buffers(engine: MegatronEngine) -> None:
    """Gather the reduced gradients into every rank's buffers: the distributed optimizer leaves each rank the part of
    the buffer that it steps."""
    dense, experts = mpu.get_data_parallel_group(with_context_parallel=True), mpu.get_expert_data_parallel_group()
    buffers = cast(list, engine.module.buffers)  # a method in torch's class, a list in Megatron's
    for held, ranks in ((buffers, dense), (engine.module.expert_parallel_buffers, experts)):
        group = cast(dist.ProcessGroup, ranks)
        for bucket in (bucket for buffer in held for bucket in buffer.buckets if group.size() > 1):
            parts = list(bucket.grad_data.chunk(group.size()))  # views: as large as all weights, it is not copied
            dist.all_gather(parts, parts[group.rank()].clone(), group=group)


# -- weights


@torch.no_grad()
def step_weights(engine: MegatronEngine, rate: float) -> None:
    """Subtract ``rate`` times the gradient in the buffers from the weights, equally on ranks that share a weight."""
    for parameter, gradient in _list_gradients(engine):
        parameter.add_(gradient, alpha=-rate)


def step_biases(engine: MegatronEngine) -> None:
    """Move the biases of experts, which have no gradient, by the load in the last ``take_gradients``."""
    if "experts" in engine.extensions:
        engine.extensions["experts"].routers.move_biases(_BIAS_STEP)


def restore_weights(engine: MegatronEngine) -> None:
    """Load the weights of the model's folder again, beside the adapters of the check."""
    load_weights(engine.decoder, engine.model)
    if "adapters" in engine.extensions:
        engine.extensions["adapters"].fill(engine.config.lora.make_values(engine.model))


# -- parts


def _padded(engine: MegatronEngine) -> dict:
    """Choose settings under which every layout has padding to be seen, and no fixed size that copies would exceed."""
    return {"pad_to_multiple_of": max(engine.config.pad_to_multiple_of, 4), "slots": 0}


def _axes(engine: MegatronEngine, positions: Tensor) -> Tensor:
    """Expand positions ``[N]`` for a model that gives images axes: ``[N, 3]``, alike in all three, as text has them."""
    has_axes = engine.model.vision and engine.model.vision.axes
    return positions[:, None].expand(-1, 3) if has_axes else positions


def _changes(before: Tensor, after: Tensor, copies: int, limit: float = 0.0) -> np.ndarray:
    """Compare outputs ``[N, ...]``: ``[copies, N / copies]`` bool, did anything change at a token? NaN is a change.

    Args:
        limit: most that counts as no change.
    """
    is_near = (before == after) | ((before - after).abs() <= limit)  # equal infinities have no difference
    same = is_near.flatten(1).all(1)
    return ~same.cpu().numpy().reshape(copies, -1)
