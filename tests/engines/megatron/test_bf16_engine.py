"""The engine in bfloat16: how exact it is, and that the optimizer keeps in fp32 what bfloat16 would round away."""

import pytest
import torch
from support.cover import in_runs, in_turn, matrix
from support.factors import LAYOUTS, PLATFORMS, STATE_EXPERT_FAMILIES, STATE_FAMILIES, parse_size
from support.huggingface import compute_logprobs, run_forward
from support.models import make_vlm
from support.ranks.engines_cases import build_engine, leave_groups, make_batch, plan
from support.ranks.pool import draw_address
from support.ranks.vlm_cases import make_images, make_vlm_batch, run_vlm_case

from engines.config import OptimizerConfig
from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import load_huggingface, probe_loss

BF16 = {"dtype": "bfloat16"}
LR, DECAY, STEPS = 1e-4, 0.5, 6


@pytest.fixture(scope="module")
def huggingface(make_hf_model):
    """``of(family)``: HuggingFace's logprobs in fp32, and how far its own in bfloat16 are from them on average."""
    made = {}

    def of(family: str) -> tuple[torch.Tensor, float]:
        if family not in made:
            spec, types = ModelSpec.from_folder(make_hf_model(family, False)), (torch.float32, torch.bfloat16)
            want, rounded = (compute_logprobs(load_huggingface(spec, dtype), make_batch()) for dtype in types)
            made[family] = want, float((rounded - want).abs().mean())
        return made[family]

    return of


def compute_outputs(rank: int, world: int, address: str, folder: str, settings: dict, platform: str) -> tuple:
    engine = build_engine(rank, world, address, folder, BF16 | settings, platform)
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    names = {type(part).__name__ for part in engine.module.modules()}
    fused = names & {"NpuRMSNorm", "NpuSwigluMLP", "NpuAttention", "NpuGroupedExperts"}
    norms = not engine.model.options[0].norms_from_one  # for which the NPU has no operator
    assert len(fused) == (2 + norms + ("ExpertLayer" in names) if platform == "npu-emulated" else 0)
    schedule, shard = plan(engine, make_batch())
    return schedule, engine.dp_rank, engine.forward(shard, every=True)


@pytest.fixture
def compare(one_rank, make_hf_model, huggingface, measured):
    """``compare(family, layout, platform)``: one rank is about as far from fp32 as HuggingFace in bfloat16."""

    def run(family: str, layout: str, platform: str = "cpu") -> None:
        case = make_hf_model(family, False), {"layout": layout}, platform
        ((schedule, _, outputs),) = one_rank.run(compute_outputs, draw_address(), *case)
        want, limit = huggingface(family)
        share = float((schedule.restore([outputs]).logprobs - want).abs().mean()) / limit
        measured({f"{platform}, over HuggingFace's own": share})
        assert 0 < share <= 1.5

    return run


@matrix({"family": ("qwen2", "llama", "qwen3"), "layout": LAYOUTS, "platform": PLATFORMS})
def test_it_is_as_exact_as_huggingface_in_bfloat16(compare, family, layout, platform):
    compare(family, layout, platform)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    "family", in_runs(default=STATE_FAMILIES, large=STATE_EXPERT_FAMILIES[:1], product=STATE_EXPERT_FAMILIES[1:])
)
def test_states_are_as_exact_as_huggingface_in_bfloat16(compare, family, platform, layout):
    compare(family, layout, platform)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "platform"),
    [
        ("qwen3_moe", "cpu"),
        ("glm4_moe", "npu-emulated"),  # which turns a part of a head
        *in_runs(large=[("glm4_moe", "cuda-emulated")], product=[("glm4_moe", "cpu")]),
    ],
)
def test_experts_are_as_exact_as_huggingface_in_bfloat16(compare, family, platform, layout):
    """Some tokens go to other experts than in fp32, there and here: not the same ones, since our router is in fp32."""
    compare(family, layout, platform)


@pytest.fixture(scope="module")
def images_and_experts(tmp_path_factory):
    """A Qwen3-VL-MoE, images, the tokens that count, their logprobs by HuggingFace in fp32, and how far its own in
    bfloat16 are from them on average."""
    folder = make_vlm(tmp_path_factory.mktemp("qwen3_vl_moe"), "qwen3_vl_moe")
    images, spec = make_images(tmp_path_factory.mktemp("images")), ModelSpec.from_folder(folder)
    batch, found = make_vlm_batch(spec, images), []
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            outputs = run_forward(load_huggingface(spec, dtype), spec, batch, probe_loss).outputs
        found.append(outputs.logprobs[batch.mask])
    want, rounded = found
    return folder, images, batch.mask, want, float((rounded - want).abs().mean())


@pytest.mark.parametrize(
    ("platform", "layout"),
    [("cpu", "thd"), *in_runs(product=[("cpu", "bshd")]), *in_turn(PLATFORMS[1:], LAYOUTS)],
)
def test_experts_that_see_images_are_as_exact_as_huggingface_in_bfloat16(
    one_rank, images_and_experts, measured, layout, platform
):
    folder, images, mask, want, limit = images_and_experts
    settings = BF16 | {"layout": layout}
    (found,) = one_rank.run(run_vlm_case, draw_address(), folder, images, settings, platform)
    logprobs = found["schedule"].restore([found["outputs"]]).logprobs[mask]
    share = float((logprobs - want).abs().mean()) / limit
    measured({f"{platform}, over HuggingFace's own": share})
    assert 0 < share <= 1.5


@matrix({"size": ("TP2", "PP2", "CP2"), "layout": LAYOUTS, "platform": ("cpu", "npu-emulated")})
def test_it_is_as_exact_over_two_ranks(two_ranks, make_hf_model, huggingface, measured, size, layout, platform):
    settings = parse_size(size) | {"layout": layout}
    ranks = two_ranks.run(compute_outputs, draw_address(), make_hf_model("qwen2", False), settings, platform)
    (schedule, outputs), *_ = [(schedule, outputs) for schedule, _, outputs in ranks if outputs]
    want, limit = huggingface("qwen2")
    share = float((schedule.restore([outputs]).logprobs - want).abs().mean()) / limit
    measured({f"{platform}, over HuggingFace's own": share})
    assert 0 < share <= 1.5


def watched_steps(rank: int, world: int, address: str, folder: str, dtype: str) -> dict:
    optimizer = OptimizerConfig(lr=LR, weight_decay=DECAY, adam_eps=1e-5, clip_grad=0.0)
    engine = build_engine(rank, world, address, folder, {"dtype": dtype, "optimizer": optimizer})
    from engines.megatron.weights import export_weights
    from engines.probes.megatron import gather_gradients

    def weights() -> dict:
        return {name: tensor.clone() for name, tensor in engine.export_weights()}

    found = {"before": weights(), "gradients": []}
    batch, optimizer_step = make_batch(), engine.optimizer.step
    _, shard = plan(engine, batch)

    def watched_step():
        found["gradients"].append({name: g.clone() for name, g in gather_gradients(engine).items()})
        return optimizer_step()

    engine.optimizer.step = watched_step
    for _ in range(STEPS):
        engine.train_step(shard, probe_loss, float(batch.mask.sum()))
    master = (lambda p: p.main_param.view(p.shape)) if dtype == "bfloat16" else (lambda p: p.data)
    masters = export_weights(engine.module.module, engine.model, master)
    found |= {"after": weights(), "masters": {name: tensor.clone() for name, tensor in masters}}
    return found | {"is_bf16": [part.config.bf16 for part in engine.optimizer.chained_optimizers]}


def by_torch(before: dict, gradients: list[dict], dtype: torch.dtype) -> dict:
    """torch's AdamW on weights of a type, of which matrices decay."""
    weights = {name: tensor.to(dtype).clone().requires_grad_() for name, tensor in before.items()}
    decay, others = [p for p in weights.values() if p.dim() > 1], [p for p in weights.values() if p.dim() == 1]
    assert decay and others
    groups = [{"params": decay, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-5)
    for step in gradients:
        for name, p in weights.items():
            p.grad = step[name].to(dtype)
        optimizer.step()
    return {name: p.detach() for name, p in weights.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_steps_are_those_of_torchs_adamw_in_fp32_and_matrices_alone_decay(one_rank, make_hf_model, family, dtype):
    """Biases are qwen2's, norms of queries and keys qwen3's; without its decay a matrix would be 9e-5 apart."""
    (found,) = one_rank.run(watched_steps, draw_address(), make_hf_model(family, False), dtype)
    assert {g.dtype for step in found["gradients"] for g in step.values()} == {torch.float32}
    want = by_torch(found["before"], found["gradients"], torch.float32)
    for name, master in found["masters"].items():
        assert master.dtype == torch.float32
        assert float((master - want[name]).abs().max()) <= 5e-7, name
        assert torch.equal(found["after"][name], master.to(getattr(torch, dtype))), name


def test_steps_that_bfloat16_would_round_away_add_up(one_rank, make_hf_model):
    """Weights above 1/16 are 2^-11 apart in bfloat16, and a step is a fifth of that."""
    (found,) = one_rank.run(watched_steps, draw_address(), make_hf_model("llama", False), "bfloat16")
    assert set(found["is_bf16"]) == {True}, "which no number shows: masters follow the type of the parameters"
    rounded = by_torch(found["before"], found["gradients"], torch.bfloat16)
    moved, moved_alone, of = 0, 0, 0
    for name, before in found["before"].items():
        large = (before.abs() > 1 / 16) & (before.abs() < 1 / 8)
        moved += int((found["after"][name] != before)[large].sum())
        moved_alone += int((rounded[name] != before)[large].sum())
        of += int(large.sum())
    assert moved > 0.3 * of > 1000 and moved_alone < 0.01 * of, (moved, moved_alone, of)


def resumed(rank: int, world: int, first: str, second: str, folder: str, target: str, settings: dict) -> list[dict]:
    """Two steps, save, two more; then the last two again in a fresh engine that had taken another one."""
    optimizer = OptimizerConfig(lr=1e-3, lr_warmup_steps=3, weight_decay=0.1)
    settings = BF16 | settings | {"optimizer": optimizer}

    def steps(engine, count: int, seed: int) -> list[float]:
        batch = make_batch(seed)
        _, shard = plan(engine, batch)
        return [engine.train_step(shard, probe_loss, float(batch.mask.sum())).lr for _ in range(count)]

    def state(engine, rates: list[float]) -> dict:
        parts = [part.optimizer for part in engine.optimizer.chained_optimizers]
        masters = [p.detach().clone() for part in parts for group in part.param_groups for p in group["params"]]
        kept = [part.state[p] for part in parts for group in part.param_groups for p in group["params"]]
        moments = [of[name].clone() for of in kept for name in ("exp_avg", "exp_avg_sq")]
        weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
        return {"rates": rates, "masters": masters, "moments": moments, "weights": weights}

    engine = build_engine(rank, world, first, folder, settings)
    steps(engine, 2, seed=1)
    engine.save(target)
    straight = state(engine, steps(engine, 2, seed=2))
    leave_groups()
    engine = build_engine(rank, world, second, folder, settings)
    steps(engine, 1, seed=5)
    engine.load(target)
    return [straight, state(engine, steps(engine, 2, seed=2))]


@pytest.mark.parametrize("settings", [{}, pytest.param({"tp": 2}, marks=pytest.mark.large)], ids=["DP2", "TP2"])
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(two_ranks, make_hf_model, tmp_path, settings):
    addresses = draw_address(), draw_address()
    for want, got in two_ranks.run(resumed, *addresses, make_hf_model("qwen2", True), str(tmp_path), settings):
        assert got["rates"] == want["rates"]
        for kind in ("masters", "moments"):
            assert {tensor.dtype for tensor in want[kind]} == {torch.float32}
            assert len(got[kind]) == len(want[kind]) > 0
            assert all(torch.equal(one, other) for one, other in zip(got[kind], want[kind], strict=True))
        assert got["weights"].keys() == want["weights"].keys()
        assert all(torch.equal(tensor, want["weights"][name]) for name, tensor in got["weights"].items())
