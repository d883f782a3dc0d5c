"""Probes of a rank of the training engine: who influences whom, what each layer computes, its gradients.

Every function is collective over the ranks of an engine. They go through the engine's own layout, attention inputs and
schedule, so that what they show is what training does. The probes look for influence by changing inputs and comparing
outputs bit by bit: what a mask hides is multiplied by an exact zero.
"""

import contextlib
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.samples import Image
from engines.batch.schedule import Schedule, plan_schedule
from engines.batch.shard import TokenOutputs, require_tokens
from engines.images.plan import number_image_sets
from engines.interfaces import LossFn
from engines.megatron.engine import MegatronEngine
from engines.megatron.groups import get_data_and_context_group
from engines.megatron.weights import export_weights, load_weights
from engines.probes.case import Influence, ProbeCase
from hardware.attention.rules import Rule

_PASS_SLOTS, _PASS_LOGITS = 2**14, 2**26
"""Tokens that one pass of a layer's attention takes, and logits that one pass of the model makes."""
_LOUD = 64.0
"""Keys and values are changed by this much, so that one among thousands of tokens is heard in bf16 too."""


# -- one layer's attention


def probe_attention(engine: MegatronEngine, kind: str, rule: Rule, case: ProbeCase) -> list[Influence]:
    """Find what each layer's core attention on this rank lets through beyond a rule, or not at all; empty if right.

    One forward pass of copies of the sequences side by side, in each of which another token's key and value are
    changed, is compared with one of unchanged copies; then one of a single copy with one that has other padding.
    """
    visible, heard_by_layer = case.compute_visible(rule)[:, list(case.columns)], {}
    for part in case.passes(_PASS_SLOTS, engine.platform.max_pack_sequences):
        repeated = part.repeated()
        attend, draw = _attention(engine, kind, rule, repeated)
        baseline, changed = draw(), draw(repeated.changed)
        for layer in engine.decoder.decoder.layers:
            effects = _changes(attend(layer, baseline), attend(layer, changed), len(part.columns)).T
            heard_by_layer.setdefault(layer, []).append(effects)
    influences = []
    attend, draw = _attention(engine, kind, rule, case)
    baseline, padded = draw(), draw(padding=_LOUD)
    for layer, passes in heard_by_layer.items():
        effects = np.concatenate(passes, axis=1)
        pads = int(_changes(attend(layer, baseline), attend(layer, padded), 1).sum())
        if pads or (effects != visible).any():
            influences.append(_explain(engine, layer, kind, rule, case, effects, pads))
    return influences


def _attention(engine: MegatronEngine, kind: str, rule: Rule, case: ProbeCase):
    """Make two functions: ``draw(changed=(), padding=0)`` makes random queries, keys and values as this rank holds
    them, and ``attend(layer, drawn) -> [N, ...]`` puts them through a layer's core attention."""
    with _settings(engine, layout=kind, **_padded(engine)):
        layout = engine.layout(case.lengths)
    dtype, tp, model = engine.transformer.params_dtype, engine.config.tp, engine.model
    spec = layout.build_mask_spec((rule,), torch.tensor(case.image_block), case.prefixes)
    rotary = engine.rotary(layout.pack(_axes(engine, _positions(case.lengths)).to(engine.device)), dtype)
    inputs = engine.platform.build_attention_inputs(spec, rotary, engine.config.attention_override)

    def draw(changed=(), padding: float = 0.0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        local = []
        for heads in (model.heads // tp, model.kv_heads // tp, model.kv_heads // tp):
            flat = torch.randn(sum(case.lengths), heads, model.head_dim, generator=generator)
            if local:  # the query of a token moves nothing but its own row
                flat[torch.as_tensor(changed, dtype=torch.long)] += _LOUD
            packed = layout.pack(flat.to(engine.device, dtype), fill=padding)
            local.append(packed.transpose(0, 1) if kind == "bshd" else packed[0])
        return local

    @torch.no_grad()
    def attend(layer, drawn: list[Tensor]) -> Tensor:
        core = layer.self_attention.core_attention
        out = core(*drawn, inputs.attention_mask, attn_mask_type=None, packed_seq_params=inputs)
        return layout.unpack(out.transpose(0, 1) if kind == "bshd" else out[None], mpu.get_context_parallel_group())

    return attend, draw


def _explain(
    engine: MegatronEngine, layer, kind: str, rule: Rule, case: ProbeCase, effects: np.ndarray, pads: int
) -> Influence:
    """Probe once more, one token at a time in a single copy, so that every leak has a source.

    A fault that takes several copies to show is told by its ``effects`` there.
    """
    attend, draw = _attention(engine, kind, rule, case)
    visible, before = case.compute_visible(rule)[:, list(case.columns)], attend(layer, draw())
    single = np.concatenate([_changes(before, attend(layer, draw((j,))), 1) for j in case.columns]).T
    return _compare(layer.layer_number, single if (single != visible).any() else effects, visible, visible, case, pads)


# -- the whole model


def probe_tokens(engine: MegatronEngine, kind: str, rules: tuple[Rule, ...], case: ProbeCase) -> list[Influence]:
    """Find what the whole model lets through from token to token, against the rules of its layers together.

    A token may see what the rules reach together. It must see what a single layer shows it: what comes by way of many
    tokens may be too faint for the last bit.
    """
    columns, visible = list(case.columns), {rule: case.compute_visible(rule) for rule in set(rules)}
    reach = np.eye(sum(case.lengths), dtype=np.float32)  # [N, N]: i is reached by j through the layers so far
    for layer in range(engine.model.layers):
        step = visible[rules[0] if len(rules) == 1 else rules[layer]] | np.eye(len(reach), dtype=bool)
        reach = (step.astype(np.float32) @ reach > 0).astype(np.float32)
    required = np.logical_or.reduce(list(visible.values()))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, engine.model.vocab - 1, (sum(case.lengths),), generator=generator)
    effects, pads = [], 0
    for part in case.passes(max(1, _PASS_LOGITS // engine.model.vocab), engine.platform.max_pack_sequences):
        repeated = part.repeated()
        baseline = ids.repeat(len(part.columns))
        changed = baseline.index_add(0, torch.tensor(repeated.changed), torch.ones(len(part.columns), dtype=torch.long))
        before, after = _predictions(engine, kind, repeated, baseline), _predictions(engine, kind, repeated, changed)
        with _pad_id(engine, engine.model.vocab - 1):
            padded = _predictions(engine, kind, repeated, baseline)
        if before is not None and after is not None and padded is not None:
            effects.append(_changes(before, after, len(part.columns)).T)
            pads = max(pads, int(_changes(before, padded, 1).sum()))
    if not effects:
        return []
    influence = _compare(0, np.concatenate(effects, axis=1), reach[:, columns] > 0, required[:, columns], case, pads)
    return [influence] if influence.leaks or influence.missing else []


@torch.no_grad()
def probe_tower(engine: MegatronEngine, images: list[Image], others: list[Image]) -> int:
    """Count images whose features change in the vision tower with the images beside them; 0 on later stages.

    Args:
        others: for each image another of its size.
    """
    if engine.vision is None:
        return 0
    merge, count = engine.vision.spec.merge, 0
    before, stops = engine.vision.see(images), np.cumsum([image.tokens(merge) for image in images])
    for number, stop in enumerate(stops):
        neighbours = [image if place == number else others[place] for place, image in enumerate(images)]
        tokens = slice(stop - images[number].tokens(merge), stop)
        count += not torch.equal(before[tokens], engine.vision.see(neighbours)[tokens])
    return count


def _predictions(engine: MegatronEngine, kind: str, case: ProbeCase, ids: Tensor) -> Tensor | None:
    """Compute ``[N, 2]``: at every token, the logprob of a target that is always the same, and the entropy."""
    batch = TrainBatch(
        case.lengths,
        ids,
        _axes(engine, _positions(case.lengths)),
        torch.zeros_like(ids),
        torch.ones(len(ids), dtype=torch.bool),
        torch.tensor(case.image_block),
    )
    with _settings(engine, micro_batch_tokens=10**9, **_padded(engine)), _blind(engine):
        outputs = compute_outputs(engine, kind, batch)
    return None if outputs is None else torch.stack([outputs.logprobs, outputs.entropy], dim=1)


# -- numbers to compare


def _plan(engine: MegatronEngine, batch: TrainBatch, replicas: int) -> Schedule:
    """Plan the schedule of a batch over replicas, as the trainer does."""
    max_sequences = engine.platform.max_pack_sequences
    return plan_schedule(
        batch.lengths, engine.config, engine.model.hidden, replicas, max_sequences, number_image_sets(batch)
    )


def compute_outputs(engine: MegatronEngine, kind: str, batch: TrainBatch) -> TokenOutputs | None:
    """Compute outputs ``[N]`` in a layout, of a batch that every replica computes; on the leader."""
    with _settings(engine, layout=kind):
        schedule = _plan(engine, batch, 1)
        (shard,) = schedule.shards(batch)
        outputs = engine.forward(replace(shard, replica=engine.dp_rank))
    return None if outputs is None else require_tokens(schedule.restore([outputs]))


def hidden_states(engine: MegatronEngine, kind: str, batch: TrainBatch) -> dict[int, Tensor]:
    """Collect what each layer of this rank's stage gives out: layer number -> ``[N, hidden]`` float32."""
    layouts, states = [], {}
    build = engine.layout

    def layout(lengths):
        layouts.append(build(lengths))
        return layouts[-1]

    def keep(layer, _, output):
        hidden = output[0] if isinstance(output, tuple) else output  # [s / tp, b, h]
        if engine.transformer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        flat = layouts[-1].unpack(hidden.transpose(0, 1), mpu.get_context_parallel_group())
        states.setdefault(layer.layer_number, []).append(flat.float().cpu())

    hooks = [layer.register_forward_hook(keep) for layer in engine.decoder.decoder.layers]
    engine.layout = layout
    try:
        compute_outputs(engine, kind, batch)
    finally:
        del engine.layout
        for hook in hooks:
            hook.remove()
    with _settings(engine, layout=kind):
        schedule = _plan(engine, batch, 1)
    return {number: schedule.restore_order(torch.cat(parts)) for number, parts in states.items()}


def compute_gradients(
    engine: MegatronEngine, kind: str, batch: TrainBatch, loss: LossFn, denominator: float
) -> dict[str, Tensor]:
    """Compute the gradient of ``sum(loss) / denominator``: HF name -> whole tensor, on the first replica's leader.

    Args:
        batch: that of all replicas; each takes its share.
    """
    with _settings(engine, layout=kind):
        schedule = _plan(engine, batch, engine.dp_size)
        engine.backward(schedule.shards(batch)[engine.dp_rank], loss, denominator)
    gradients = gather_gradients(engine)
    return gradients if engine.is_leader and engine.dp_rank == 0 else {}


def gather_gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    """Gather what the last backward pass left, reduced over all replicas: HF name -> whole tensor, on every rank."""
    # The distributed optimizer leaves each rank the reduced part of the buffer that it steps; gather the rest.
    group = get_data_and_context_group()
    for buffer in cast(list, engine.module.buffers):  # a method in torch's class, a list in Megatron's
        for bucket in buffer.buckets:
            parts = bucket.grad_data.chunk(group.size())
            reduced = [torch.empty_like(part) for part in parts]
            dist.all_gather(reduced, parts[group.rank()].clone(), group=group)
            bucket.grad_data.copy_(torch.cat(reduced))
    gradient = lambda p: p.main_grad if p.requires_grad else torch.zeros_like(p)  # noqa: E731 (a frozen one has none)
    exported = export_weights(engine.decoder, engine.model, gradient)
    return {name: tensor.clone().cpu() for name, tensor in exported}


# -- weights


@torch.no_grad()
def scale_weights(engine: MegatronEngine, factor: float) -> None:
    """Multiply every weight: other weights, the same on every rank that shares one."""
    for parameter in engine.module.parameters():
        parameter.mul_(factor)


def restore_weights(engine: MegatronEngine) -> None:
    """Load the weights of the model's folder again."""
    load_weights(engine.decoder, engine.model)


# -- parts


def _padded(engine: MegatronEngine) -> dict:
    """Choose settings under which every layout has padding to be seen, and no fixed size that copies would exceed."""
    return {"pad_to_multiple_of": max(engine.config.pad_to_multiple_of, 4), "slots": 0}


@contextlib.contextmanager
def _settings(engine: MegatronEngine, **changes):
    """Give the engine other settings for a while."""
    config, engine.config = engine.config, replace(engine.config, **changes)
    try:
        yield
    finally:
        engine.config = config


@contextlib.contextmanager
def _blind(engine: MegatronEngine):
    """Let image tokens be embedded as text is, for sequences without images."""
    vision, engine.vision = engine.vision, None
    try:
        yield
    finally:
        engine.vision = vision


@contextlib.contextmanager
def _pad_id(engine: MegatronEngine, pad_id: int):
    previous, engine.pad_id = engine.pad_id, pad_id
    try:
        yield
    finally:
        engine.pad_id = previous


def _positions(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def _axes(engine: MegatronEngine, positions: Tensor) -> Tensor:
    """Expand positions ``[N]`` for a model that gives images axes: ``[N, 3]``, alike in all three, as text has them."""
    has_axes = engine.model.vision and engine.model.vision.axes
    return positions[:, None].expand(-1, 3) if has_axes else positions


def _changes(before: Tensor, after: Tensor, copies: int) -> np.ndarray:
    """Compare outputs ``[N, ...]``: ``[copies, N / copies]`` bool, did anything change at a token? NaN is a change."""
    same = (before == after).flatten(1).all(1)
    return ~same.cpu().numpy().reshape(copies, -1)


def _compare(
    layer: int, effects: np.ndarray, allowed: np.ndarray, required: np.ndarray, case: ProbeCase, pads: int
) -> Influence:
    """Sort by kind the effects ``[N, columns]`` beyond what is allowed, and what is required and has no effect."""
    # [N] each: the sequence of a token, and its position in it.
    place = np.repeat(np.arange(len(case.lengths)), case.lengths), _positions(case.lengths).numpy()
    columns = case.columns
    leaks = {"padding": pads} if pads else {}
    words = [f"{pads} tokens see padding"] if pads else []
    for i, column in zip(*np.nonzero(effects & ~allowed)):
        j = columns[column]
        kind = _classify_leak(int(i), int(j), *place, np.asarray(case.image_block))
        leaks[kind] = leaks.get(kind, 0) + 1
        words.append(f"sequence {place[0][i]} at {place[1][i]} sees sequence {place[0][j]} at {place[1][j]}")
    missing = np.argwhere(required & ~effects)
    words += [
        f"sequence {place[0][i]} at {place[1][i]} does not see its own token at {place[1][columns[c]]}"
        for i, c in missing[:1]
    ]
    return Influence(layer, leaks, len(missing), words[0] if words else "")


def _classify_leak(i: int, j: int, sequence: np.ndarray, position: np.ndarray, image: np.ndarray) -> str:
    if sequence[i] != sequence[j]:
        return "a neighbour in the pack"
    if position[j] <= position[i]:
        return "outside the window or chunk"
    return "across image blocks" if image[i] >= 0 and image[j] >= 0 else "the future"
