"""The planner's bytes against engines that are built."""

import weakref

import pytest
import torch
from support.cover import matrix
from support.factors import IMAGE_FAMILIES, IMAGE_STATE_FAMILIES, TWO_RANKS, parse_size
from support.models import make_vlm
from support.ranks.engines_cases import build_engine, plan
from support.ranks.pool import draw_address
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.batch.batch import TrainBatch
from engines.config import LoraConfig
from engines.megatron.memory.activations import (
    MicroBatch,
    count_copied_slots,
    count_kept,
    describe_routed,
)
from engines.megatron.memory.estimate import compute_rank_memory, list_parameters
from engines.models.spec import ModelSpec
from engines.probes.saved_bytes import SavedBytes, find_place
from rlworker.checks.reference.huggingface import probe_loss

MODELS = {
    "qwen2-tied": ("qwen2", True, "language"),
    "qwen3-untied": ("qwen3", False, "language"),
    "llama-critic": ("llama", False, "value"),
    "gemma3-tied": ("gemma3_text", True, "language"),
}
"""Family, whether its embeddings are tied, and its head."""


def bytes_held(rank: int, world: int, address: str, folder: str, settings: dict, head: str) -> dict:
    """What an engine holds, and what was planned for its rank."""
    from megatron.core import parallel_state as mpu

    from engines.megatron.weights import name_parameters

    model = ModelSpec.from_folder(folder, head)
    engine = build_engine(rank, world, address, model, settings)
    for part in engine.optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
    parts, buffers = (
        engine.optimizer.chained_optimizers,
        [*engine.module.buffers, *engine.module.expert_parallel_buffers],
    )
    masters = [shard for part in parts for group in part.shard_fp32_from_float16_groups for shard in group]
    states = [state for part in parts for state in part.optimizer.state.values()]
    kept = [*masters, *(value for state in states for value in state.values())]
    held = {
        "parameters": sum(buffer.param_data.nbytes for buffer in buffers)
        + sum(p.nbytes for p in engine.module.parameters() if not p.requires_grad)
        + sum(
            router.bias.nbytes
            for router in (engine.extensions["experts"].routers.layers if "experts" in engine.extensions else ())
            if router.bias is not None
        ),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(tensor.nbytes for tensor in kept if isinstance(tensor, torch.Tensor)),
    }
    stage, place = mpu.get_pipeline_model_parallel_rank(), rank % (world // engine.config.pp)
    memory = compute_rank_memory(model, engine.config, stage, place, MicroBatch(), engine.platform.kernel_memory)
    planned = vars(memory)
    parameters = [(name, tuple(p.shape)) for name, p in name_parameters(engine.module.module).items()]
    wanted = [(p.name, p.shape) for p in list_parameters(model, engine.config, stage)]
    planned = {name: planned[name] for name in held}
    return {"held": held, "planned": planned, "parameters": parameters, "wanted": wanted}


@matrix({"size": TWO_RANKS, "model": tuple(MODELS), "dtype": ("float32", "bfloat16")}, triples=True)
def test_planned_bytes_are_those_of_the_engine(two_ranks, make_hf_model, size, model, dtype):
    family, tied, head = MODELS[model]
    folder, settings = make_hf_model(family, tied), parse_size(size)
    for rank in two_ranks.run(bytes_held, draw_address(), folder, settings | {"dtype": dtype}, head):
        assert rank["parameters"] == rank["wanted"]
        assert rank["held"] == rank["planned"]


@pytest.mark.parametrize(
    ("size", "family", "settings"),
    [
        ("TP2-EP2", "qwen3_moe", {"dtype": "bfloat16"}),
        ("TP2", "qwen3_5_text", {"dtype": "bfloat16"}),
        pytest.param("PP2", "qwen3_5_text", {}, marks=pytest.mark.large),
        ("one", "glm4_moe", {"dtype": "bfloat16", "freeze": ("router",)}),
        pytest.param("TP4", "qwen2", {}, marks=pytest.mark.large),  # which share two heads of keys and values
        *(
            pytest.param(size, family, {}, marks=pytest.mark.large)
            for size in ("DP2-EP2", "TP2-ETP2", "CP2", "TP2-DP2-EP2", "PP2-TP2-EP2")
            for family in ("qwen3_moe", "glm4_moe", "qwen3_next")
        ),
    ],
)
def test_planned_bytes_of_experts_and_shared_heads(pool_of, make_hf_model, size, family, settings):
    settings = parse_size(size) | settings
    for rank in pool_of(size).run(bytes_held, draw_address(), make_hf_model(family, False), settings, "language"):
        assert rank["parameters"] == rank["wanted"]
        assert rank["held"] == rank["planned"]


@pytest.mark.parametrize(
    ("size", "family", "head", "settings"),
    [
        ("TP2", "qwen2", "language", {"dtype": "bfloat16", "lora": LoraConfig(rank=4)}),
        ("PP2", "phi3", "language", {"lora": LoraConfig(rank=3, targets=("mlp", "qkv_proj"))}),
        ("DP2", "llama", "value", {"lora": LoraConfig(rank=4, targets=("q_proj", "mlp"))}),
        ("DP2-EP2", "qwen3_moe", "language", {"lora": LoraConfig(rank=4, targets=("attention", "experts"))}),
    ],
)
def test_planned_bytes_of_adapters(two_ranks, make_hf_model, size, family, head, settings):
    folder, settings = make_hf_model(family, True), parse_size(size) | settings
    for rank in two_ranks.run(bytes_held, draw_address(), folder, settings, head):
        assert rank["parameters"] == rank["wanted"]
        assert rank["held"] == rank["planned"]


@pytest.mark.large
@pytest.mark.parametrize(("size", "family"), [("TP2", "qwen2_5_vl"), ("PP2", "qwen3_vl"), ("TP2", "qwen3_5")])
def test_planned_bytes_of_adapters_of_a_tower(two_ranks, tmp_path, size, family):
    settings = parse_size(size) | {"lora": LoraConfig(rank=4, targets=("attention", "mlp", "vision", "projector"))}
    for rank in two_ranks.run(bytes_held, draw_address(), make_vlm(tmp_path, family), settings, "language"):
        assert rank["parameters"] == rank["wanted"]
        assert rank["held"] == rank["planned"]


@pytest.mark.large
@pytest.mark.parametrize(("size", "frozen"), [("TP2", "vision"), ("PP2", "")])
def test_planned_bytes_where_a_model_with_images_has_states(two_ranks, tmp_path, size, frozen):
    test_planned_bytes_of_a_vision_language_model(two_ranks, tmp_path, size, IMAGE_STATE_FAMILIES[0], frozen)


@matrix(
    {"size": TWO_RANKS, "family": IMAGE_FAMILIES, "frozen": ("", "vision", "vision projector", "language")},
    allowed=lambda case: (case["size"], case["frozen"]) != ("PP2", "language"),
    triples=True,
)
def test_planned_bytes_of_a_vision_language_model(two_ranks, tmp_path, size, family, frozen):
    settings = parse_size(size) | {"freeze": tuple(frozen.split())}
    for rank in two_ranks.run(bytes_held, draw_address(), make_vlm(tmp_path, family), settings, "language"):
        assert rank["parameters"] == rank["wanted"]
        assert rank["held"] == rank["planned"]


# -- activations: every tensor that an engine saves for its backward pass

WITHIN = 0.07
TOKENS, SEQUENCES = 64, 8
"""Inputs of each sequence, and sequences of the step."""


def count_bytes(engine, sequences: list[list[int]], prompt: int) -> tuple:
    batch = TrainBatch.from_ids(sequences, [prompt] * len(sequences))
    batch = TrainBatch(lengths=batch.lengths, **batch.columns() | {"advantages": torch.ones(batch.num_tokens)})
    schedule, shard = plan(engine, batch)
    kept = SavedBytes({find_place(parameter) for parameter in engine.module.parameters()})
    with kept.counting():
        engine.backward(shard, probe_loss, 7.0)
    assert not kept.now, "everything is given back"
    return kept.most, shard, schedule


def measure_kept(rank: int, world: int, address: str, folder: str, settings: dict) -> tuple[int, float]:
    """What autograd held, and what was planned."""
    from megatron.core import parallel_state as mpu

    engine = build_engine(rank, world, address, folder, settings)
    most, shard, _ = count_bytes(engine, [[3] * (TOKENS + 1)] * SEQUENCES, 1)
    sequences = shard.counts[0]
    assert set(shard.counts) == {sequences} and len(shard.counts) >= engine.config.pp
    micro, stage = MicroBatch(sequences * TOKENS, sequences), mpu.get_pipeline_model_parallel_rank()
    return most, count_kept(engine.model, engine.config, stage, micro, engine.platform.kernel_memory).most


CASES = [
    ("qwen2", "one", {"recompute": "core"}),
    ("qwen3", "TP2", {"recompute": "full", "layout": "bshd"}),
    ("qwen2", "CP2", {}),
    ("qwen3", "PP2", {}),
    ("gemma3_text", "one", {}),
    ("qwen3_moe", "one", {}),
    ("qwen3_5_text", "one", {}),
    ("llama", "one", {"lora": LoraConfig(rank=4)}),
]
MORE_CASES = [
    ("qwen3", "one", {}),
    ("llama", "one", {"recompute": "full", "dtype": "bfloat16"}),
    ("qwen3", "one", {"layout": "bshd", "dtype": "bfloat16"}),
    ("qwen3", "one", {"recompute": "full"}),
    ("qwen3", "one", {"recompute": "core", "dtype": "bfloat16"}),
    ("qwen2", "TP2", {}),
    ("qwen3", "CP2", {"recompute": "core", "layout": "bshd"}),
    ("llama", "PP2", {"recompute": "full"}),
    ("gemma3_text", "TP2", {"dtype": "bfloat16"}),
    ("gemma3_text", "one", {"recompute": "full", "layout": "bshd"}),
    ("gemma3_text", "one", {"recompute": "core"}),
    ("qwen3_5_text", "one", {"dtype": "bfloat16"}),
    ("qwen3_5_text", "one", {"recompute": "full"}),
    ("qwen3_5_text", "one", {"recompute": "core"}),
    ("qwen3_5_text", "TP2", {"layout": "bshd"}),
    ("qwen3_5_text", "CP2", {}),
    ("qwen3_moe", "one", {"dtype": "bfloat16"}),
    ("qwen3_moe-dense", "one", {"recompute": "full"}),
    ("qwen2_moe", "one", {}),
    ("qwen3_moe", "TP2", {}),
    ("qwen2-one-head", "TP2", {}),
    ("qwen3-one-head", "TP2", {"dtype": "bfloat16"}),
    ("qwen2", "TP4", {"recompute": "core"}),
    ("qwen3_next", "one", {}),
    ("qwen3_next", "TP2", {"recompute": "core"}),
    ("glm4_moe", "one", {}),
    ("glm4_moe", "one", {"dtype": "bfloat16"}),
    ("glm4_moe-air", "TP2", {"recompute": "full"}),
    ("qwen2", "TP2", {"lora": LoraConfig(rank=4)}),
    ("qwen3", "one", {"lora": LoraConfig(rank=4), "recompute": "core"}),
    ("llama", "PP2", {"lora": LoraConfig(rank=4), "recompute": "full"}),
    ("qwen3", "one", {"lora": LoraConfig(rank=4), "dtype": "bfloat16"}),
]


@pytest.mark.parametrize(
    ("family", "size", "settings"), [*CASES, *(pytest.param(*case, marks=pytest.mark.large) for case in MORE_CASES)]
)
def test_what_autograd_keeps_is_planned(pool_of, make_hf_model, measured, family, size, settings):
    settings = parse_size(size) | {"micro_batch_tokens": 2 * TOKENS, "share": "none"} | settings
    for found, planned in pool_of(size).run(measure_kept, draw_address(), make_hf_model(family, False), settings):
        apart = planned / found - 1
        measured({"planned over kept - 1": abs(apart)})
        assert abs(apart) < WITHIN


def list_tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators made and that someone still has: ``now`` and, at ``most``."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in list_tensors((args, kwargs))}
        for storage in (tensor.untyped_storage() for tensor in list_tensors(made)):
            if (place := storage._cdata) not in given | self.sizes.keys():
                self.sizes[place] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.drop, place)
        self.most = max(self.most, self.now)
        return made

    def drop(self, place: int) -> None:
        self.now -= self.sizes.pop(place)


def measure_experts(rank: int, world: int, address: str, folder: str, settings: dict) -> dict:
    """What autograd held of a pass, what a layer of experts made of a micro-batch on average, and what was planned."""
    from hardware.megatron.experts import ExpertLayer

    engine = build_engine(rank, world, address, folder, settings)
    ids = torch.randint(3, 90, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(3)).tolist()
    kept, shard, _ = count_bytes(engine, ids, 1)
    layer, live, made = next(part for part in engine.module.modules() if isinstance(part, ExpertLayer)), LiveBytes(), []

    def forward(*args, **kwargs):
        with live:
            before = live.most = live.now
            found = ExpertLayer.forward(layer, *args, **kwargs)
        made.append(live.most - before)
        return found

    layer.forward = forward
    count_bytes(engine, ids, 1)
    config, model, slots = engine.config, engine.model, shard.counts[0] * TOKENS
    routed = describe_routed(model, config, MicroBatch())
    own = model.experts.count_routed(routed) + model.experts.count_dispatched(routed)
    return {
        "kept": kept,
        "planned": count_kept(model, config, 0, MicroBatch(slots, shard.counts[0]), engine.platform.kernel_memory).most,
        "made": sum(made) / len(made),
        "planned to be made": own * slots / config.tp / config.cp,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "size",
    ["TP2-EP2", *(pytest.param(size, marks=pytest.mark.large) for size in ("DP2", "DP2-EP2", "TP2-ETP2", "CP2-EP2"))],
)
def test_what_experts_of_other_ranks_take_is_planned(pool_of, make_hf_model, measured, size, dtype):
    """Over the ranks together: a rank with popular experts has more rows, another fewer."""
    settings = parse_size(size) | {"micro_batch_tokens": 2 * TOKENS, "share": "none", "dtype": dtype}
    ranks = pool_of(size).run(measure_experts, draw_address(), make_hf_model("qwen3_moe", False), settings)
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    apart = [total["planned"] / total["kept"] - 1, total["planned to be made"] / total["made"] - 1]
    measured({"planned over kept - 1": apart[0], "planned over made - 1": apart[1]})
    assert max(map(abs, apart)) < WITHIN


def measure_shared(rank: int, world: int, address: str, folder: str, settings: dict) -> tuple[int, float]:
    """The most bytes that autograd held of samples of one prompt, and what slots and copies were planned to take."""
    engine = build_engine(rank, world, address, folder, settings)
    most, _, schedule = count_bytes(engine, [[3] * TOKENS + [i + 4] * 17 for i in range(SEQUENCES)], TOKENS)
    kernels, slots = engine.platform.kernel_memory, schedule.count_computed()
    assert slots == TOKENS + 16 * SEQUENCES
    copied = count_copied_slots(engine.model, engine.config, kernels) * sum(schedule.lengths)
    each = count_kept(engine.model, engine.config, 0, MicroBatch(slots, SEQUENCES), kernels).most / slots
    return most, each * (slots + copied)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_what_shared_prompts_keep_is_planned(one_rank, make_hf_model, measured, family):
    """Slots, and copies of keys and values for all tokens. The projection's output and a slot's own keys are not kept
    beside these, but planned."""
    ((found, planned),) = one_rank.run(measure_shared, draw_address(), make_hf_model(family, False), {})
    measured({"planned over kept - 1": planned / found - 1})
    assert 0 <= planned / found - 1 < 0.2
