"""Ranks in shapes, against the plan and against the same code with numbers."""

import math
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from support.cover import in_runs
from support.models import make_vlm, write_config
from support.ranks.engines_cases import build_engine
from support.ranks.pool import draw_address
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from engines.config import LoraConfig, MegatronConfig, OptimizerConfig, VllmConfig
from engines.megatron.memory.activations import count_kept
from engines.models.spec import ModelSpec
from hardware.platforms import get_platform
from hardware.shapes.calls import Call, describe_call
from hardware.shapes.kernels import count_flops
from hardware.shapes.platform import make_shaped
from rlworker.checks.shapes.case import RankCase, RankCount
from rlworker.checks.shapes.images import find_grid
from rlworker.checks.shapes.run import choose_ranks, describe_counts, list_cases, plan_case, plan_rank, run_cases
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig
from scripts.simulate import card

TINY = {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1001, "rope_theta": 1e6}
TINY |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
EXPERTS = TINY | {"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 32, "norm_topk_prob": True}
QWEN_7B = TINY | {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
QWEN_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}


def make_config(folder: str, **actor) -> RunConfig:
    return RunConfig(
        model=folder,
        platform="cuda",
        data=DataConfig(max_prompt_tokens=256),
        actor=MegatronConfig(**{"dtype": "bfloat16", "micro_batch_tokens": 2048} | actor),
        rollout=VllmConfig(max_new_tokens=256, dtype="bfloat16"),
        prompts_per_step=8,
        samples_per_prompt=8,
        steps=1,
    )


def run(config: RunConfig, ranks: list[int]) -> list[tuple[RankCase, RankCount]]:
    cases = list_cases(config, ModelSpec.from_folder(config.model), ranks)
    return list(zip(cases, run_cases(cases), strict=True))


def check_static(config: RunConfig, case: RankCase, count: RankCount) -> None:
    """What is held is planned to the byte, and what autograd keeps nearly."""
    memory = plan_rank(case, config)
    assert count.held == {kind: getattr(memory, kind) for kind in count.held}
    kernels = get_platform(case.platform).kernel_memory
    kept = count_kept(case.model, case.config, case.stage, plan_case(case, config), kernels).most
    assert count.kept == pytest.approx(kept, rel=0.07)


def check_flops(case: RankCase, count: RankCount) -> None:
    """Products and attention of a step are those of the forecast. Torch counts attention as if nothing were masked."""
    work = card.count_work(case)
    assert count.flops == pytest.approx(work.products + 2 * work.attention, rel=0.03)


def test_flops_of_products_that_torch_leaves_out():
    """Worked by hand: two for each of the 2 x 3 x 5 products of numbers."""
    rows, weights, sums = torch.empty(2, 3), torch.empty(4, 3, 5), torch.empty(2, 5)
    assert count_flops(torch.ops.aten.addmm_.default, (sums, rows, weights[0]), {}, sums) == 60
    grouped = torch.ops.aten._grouped_mm.default
    assert count_flops(grouped, (rows, weights, torch.tensor([0, 1, 1, 2])), {}, sums) == 60
    assert count_flops(grouped, (rows.T, sums, torch.tensor([0, 1, 1, 2])), {}, weights) == 60
    assert count_flops(torch.ops.aten.mm.default, (rows, weights[0]), {}, sums) == 60
    assert count_flops(torch.ops.aten.add_.Tensor, (sums, sums), {}, sums) == 0


@pytest.mark.large
def test_a_rank_steps_and_exports_without_its_device(tmp_path):
    config = make_config(write_config(tmp_path, TINY))
    ((case, count),) = run(config, [0])
    check_static(config, case, count)
    assert count.activations == pytest.approx(plan_rank(case, config).activations, rel=0.15)
    assert (case.sequences, case.micro_batches) == (4, 1)
    assert count.tensors == len(case.model.list_hf_names()) and count.exported == 2 * case.model.count_weights()
    text, fits = describe_counts([case], [count], config, 0.001)
    assert not fits and "differs" not in text
    assert re.search("Does not fit into 0.001 GB in shapes: rank 0 needs .* GB; raise --actor.tp, --actor.pp or", text)


def test_ranks_are_chosen_from_every_kind_of_stage(tmp_path):
    config = make_config(write_config(tmp_path, TINY | {"num_hidden_layers": 8}), ranks=32, tp=2, pp=4)
    assert choose_ranks(config) == [0, 16, 24, 31]
    cases = list_cases(config, ModelSpec.from_folder(config.model), [31])
    assert (cases[0].stage, cases[0].micro_batches) == (3, 4)
    with pytest.raises(ValueError, match="--run-shapes names rank 32, expected 0 to 31"):
        list_cases(config, cases[0].model, [32])


def test_a_platform_with_operators_of_its_own_is_refused():
    for name in ("npu", "npu-emulated"):
        with pytest.raises(ValueError, match=f"{name} computes by operators of torch_npu.*run shapes by --platform"):
            make_shaped(get_platform(name))


@pytest.mark.parametrize(
    "sizes",
    in_runs(
        large=[{"ranks": 4, "cp": 2, "pp": 2, "recompute": "full"}],
        product=[
            {"ranks": 4, "tp": 2, "pp": 2},
            {"ranks": 8, "tp": 4, "optimizer": OptimizerConfig(offload_fraction=0.25)},
        ],
    ),
)
def test_stages_and_parts_of_a_model(tmp_path, sizes):
    config = make_config(write_config(tmp_path, TINY), **sizes)
    for case, count in run(config, choose_ranks(config)):
        check_static(config, case, count)


@pytest.mark.parametrize("sizes", in_runs(large=[{"ranks": 2, "ep": 2}], product=[{"ranks": 4, "ep": 2, "pp": 2}]))
def test_experts_with_balanced_and_with_worst_routes(tmp_path, sizes):
    config = make_config(write_config(tmp_path, EXPERTS), **sizes)
    found = run(config, [1])
    for case, count in found:
        check_static(config, case, count)
        assert count.activations == pytest.approx(plan_rank(case, config).activations, rel=0.15)
    assert found[1][1].kept > found[0][1].kept, "the worst routes bring more rows"
    check_flops(*found[0])


@pytest.mark.large
@pytest.mark.parametrize("rank", [0, 16])
def test_a_rank_of_seven_billion_parameters(tmp_path, rank):
    sizes = {"ranks": 8, "tp": 4, "recompute": "full", "micro_batch_tokens": 14336, "lora": LoraConfig(rank=rank)}
    config = make_config(write_config(tmp_path, QWEN_7B), **sizes)
    ((case, count),) = run(config, [5])
    check_static(config, case, count)
    check_flops(case, count)
    assert count.activations == pytest.approx(plan_rank(case, config).activations, rel=0.1)


def count_in_numbers(case: RankCase) -> tuple[dict[str, int], int]:
    """What an engine holds, and what autograd held in its step, with numbers and over gloo."""
    import torch.distributed as dist

    from engines.probes.saved_bytes import SavedBytes, find_place
    from hardware.platforms import get_platform

    platform = get_platform(case.platform)
    device = platform.init_process(0)
    from engines.megatron.engine import MegatronEngine
    from engines.megatron.groups import init_distributed
    from rlworker.checks.shapes.rank import compute_loss, list_held, make_shard

    init_distributed(platform, case.config, 0, "localhost:0", 0, dist.HashStore())
    engine = MegatronEngine(case.model, case.config, platform, device)
    if vision := case.model.vision:
        make_patches = lambda images: torch.zeros(sum(image.patches for image in images), vision.patch_size)  # noqa: E731
        engine.extensions["vision"].processor.patches = make_patches
    saved = SavedBytes({find_place(parameter) for parameter in engine.module.parameters()})
    with saved.counting():
        engine.train_step(make_shard(case, 0), compute_loss, 1.0)
    return list_held(engine), saved.most


@pytest.mark.parametrize("recompute", in_runs(large=["core"], product=["none", "full"]))
def test_the_same_code_in_shapes_and_in_numbers(make_hf_model, recompute):
    config = MegatronConfig(recompute=recompute)
    case = RankCase(ModelSpec.from_folder(make_hf_model("qwen2", True)), config, "cuda-emulated", 0, 65, 4, 2)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        held, kept = process.submit(count_in_numbers, case).result()
    (count,) = run_cases([case])
    assert count.held == held
    assert count.kept == pytest.approx(kept, rel=0.07)


@pytest.mark.parametrize(
    ("family", "recompute"),
    in_runs(large=[("qwen2_5_vl", "full")], product=[("qwen2_5_vl", "none"), ("qwen3_vl", "full")]),
)
def test_images_in_shapes_and_in_numbers(tmp_path, family, recompute):
    model = ModelSpec.from_folder(make_vlm(tmp_path, family))
    config = MegatronConfig(recompute=recompute, dtype="bfloat16")
    case = RankCase(model, config, "cuda-emulated", 0, 65, 4, 2)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        held, kept = process.submit(count_in_numbers, case).result()
    (count,) = run_cases([case])
    assert count.held == held
    assert count.kept == pytest.approx(kept, rel=0.07)


@pytest.mark.large
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2_5_vl", {"ranks": 2, "tp": 2}),
        ("qwen2_5_vl", {"ranks": 4, "cp": 2, "pp": 2, "recompute": "full"}),
        ("qwen3_5_moe", {"ranks": 4, "tp": 2, "ep": 2, "recompute": "full"}),
    ],
    ids=str,
)
def test_stages_of_a_model_that_sees_images(tmp_path, family, sizes):
    config = make_config(make_vlm(tmp_path, family, max_position_embeddings=1024), **sizes)
    for case, count in run(config, choose_ranks(config)):
        memory = plan_rank(case, config)
        assert count.held == {kind: getattr(memory, kind) for kind in count.held}


def test_a_tower_that_was_not_run_is_refused(tmp_path):
    config = make_config(make_vlm(tmp_path, "gemma3", max_position_embeddings=1024))
    with pytest.raises(ValueError, match=r"runs the towers of qwen2_vl, .* and .* is a gemma3; leave it"):
        list_cases(config, ModelSpec.from_folder(config.model), [0])


def test_an_image_leaves_room_for_a_sample(tmp_path):
    seen = ModelSpec.from_folder(make_vlm(tmp_path, "qwen2_5_vl")).require_vision()
    grid = find_grid(seen, 4096)
    image = grid[1] * grid[2] // seen.merge**2
    assert grid[0] == 1 and 4096 * 0.8 < image <= 4096 - 512 - 3
    with pytest.raises(ValueError, match="sequences of 3 tokens, expected at least 4 for an image; raise"):
        find_grid(seen, 3)


class Listening(TorchDispatchMode):
    """Lists collectives and messages as they are called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "c10d":
            self.calls.append(describe_call(operator, args))
        return operator(*args, **kwargs or {})


def listen(rank: int, world: int, address: str, case: RankCase) -> tuple[list[Call], list[tuple[str, int]]]:
    """A real step's collectives: as torch was called, and as gloo says that it ran them, with the bytes it got."""
    from rlworker.checks.shapes.rank import compute_loss, make_shard

    config = case.config
    engine = build_engine(rank, world, address, case.model, {"tp": config.tp, "pp": config.pp, "cp": config.cp})
    shard = make_shard(case, engine.dp_rank)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace, Listening() as listening:
        engine.train_step(shard, compute_loss, 1.0)
    sizes = {"float": 4, "long": 8, "long int": 8, "int": 4, "": 0}
    events = sorted(trace.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    heard = [
        (event.name().removeprefix("gloo:"), math.prod(event.shapes()[0]) * sizes[event.dtypes()[0]])
        for event in events
        if event.name().startswith("gloo:")
    ]
    return listening.calls, heard


OF_GLOO = {"allreduce": "all_reduce", "broadcast": "broadcast", "recv": "recv", "send": "send"}
OF_GLOO |= dict.fromkeys(("allgather", "allgather_base", "allgather_into_tensor_coalesced"), "all_gather")
OF_GLOO |= dict.fromkeys(("reduce_scatter_base", "reduce_scatter_tensor_coalesced"), "all_reduce")
"""Torch's operator -> gloo's, which scatters sums by adding up the whole."""
GATHERED = ("allgather_base", "allgather_into_tensor_coalesced")
"""Operators whose largest tensor is gathered; gloo tells a rank's part of it."""


@pytest.mark.large
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_collectives_are_those_that_gloo_ran(make_hf_model, four_ranks, sizes):
    config = MegatronConfig(ranks=4, **sizes)
    model = ModelSpec.from_folder(make_hf_model("qwen2", True))
    cases = [RankCase(model, config, "cpu", rank, 65, 2, 3) for rank in (0, 3)]
    ranks = four_ranks.run(listen, draw_address(), cases[0])
    for (called, heard), count in zip(ranks[::3], run_cases(cases), strict=True):
        assert count.calls == called
        parts = [len(call.ranks) if call.name in GATHERED else 1 for call in called]
        expected = [(OF_GLOO[call.name], call.nbytes // part) for call, part in zip(called, parts, strict=True)]
        assert sorted(heard) == sorted(expected) and len(called) > 20


@pytest.mark.large
def test_a_rank_that_fails_is_named(tmp_path):
    from rlworker.base.errors import RunError

    config = make_config(write_config(tmp_path, TINY))
    (case,) = list_cases(config, ModelSpec.from_folder(config.model), [0])
    with pytest.raises(RunError, match="rank 0 of 1, stage 0, failed in shapes"):
        run_cases([replace(case, micro_batches=0)])
