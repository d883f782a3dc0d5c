"""What waits in the host's memory: it is there, it comes when it is needed, and no number changes."""

import os
from unittest.mock import patch

import pytest
import torch
from support.ranks.engines_cases import build_engine, leave_groups, make_batch, plan, start_process
from support.ranks.pool import draw_address

from engines.batch.balance import choose_largest
from engines.config import OptimizerConfig
from rlworker.checks.reference.huggingface import probe_loss


def hosted_steps(rank: int, world: int, address: str, folder: str, dtype: str, fraction: float, out: str) -> dict:
    """Weights after two steps: straight on, with state on the host, and resumed between the steps with and without it;
    and where that state is."""

    def build(share: float):
        optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, offload_fraction=share)
        return build_engine(rank, world, address, folder, {"dtype": dtype, "optimizer": optimizer})

    def step(engine) -> None:
        engine.train_step(shard, probe_loss, float(batch.mask.sum()))

    plain, hosted, batch = build(0.0), build(fraction), make_batch()
    _, shard = plan(plain, batch)
    (part,) = hosted.optimizer.chained_optimizers
    state, seen = part.prepare_grads.__self__, []

    def look(*_) -> None:
        masters = {id(each) for group in part.optimizer.param_groups for each in group["params"]}
        own = [(id(each) in masters, each.grad is not None) for each in state.on_host]
        seen.append((all(cpu_offload for cpu_offload, _ in own), all(has_gradient for _, has_gradient in own)))

    part.optimizer.register_step_pre_hook(look)
    step(plain)
    step(hosted)
    hosted.save(out)
    resumed = [build(fraction), build(0.0)]
    for engine in resumed:
        engine.load(out)
    every = [plain, hosted, *resumed]
    for engine in every:
        step(engine)
    look()
    weights = [{name: tensor.clone() for name, tensor in engine.export_weights()} for engine in every]
    prepared = sum(tensor.untyped_storage().nbytes() for tensor in state.placeholders)
    numbers = [sum(p.numel() for p in x) for x in (state.on_host, part.optimizer.param_groups[0]["params"])]
    moments = [value for p in state.on_host for value in part.optimizer.state[p].values()]
    return {"weights": weights, "seen": seen, "likeness_bytes": prepared, "tensors": len(state.on_host)} | {
        "moments": len(moments),
        "numbers": numbers,
    }


@pytest.mark.parametrize(
    ("dtype", "fraction"), [pytest.param("float32", 1.0, marks=pytest.mark.large), ("bfloat16", 0.5)]
)
def test_a_step_on_the_host_is_the_same_step(two_ranks, make_hf_model, tmp_path, dtype, fraction):
    arguments = (draw_address(), make_hf_model("qwen2", False), dtype, fraction, str(tmp_path))
    for rank in two_ranks.run(hosted_steps, *arguments):
        plain, *others = rank["weights"]
        for other in others:
            assert all(torch.equal(tensor, other[name]) for name, tensor in plain.items())
        assert rank["seen"] == [(True, True), (True, True), (True, False)], "on the host in a step and after it"
        assert rank["likeness_bytes"] == 4 * rank["tensors"] > 0, "a number each"
        assert rank["moments"] == 2 * rank["tensors"]
        assert rank["numbers"][0] >= fraction * rank["numbers"][1]


def test_the_largest_tensors_go_until_the_share_is_there():
    assert choose_largest([5, 1, 3, 1], 0.5) == {0}
    assert choose_largest([5, 1, 3, 1], 0.51) == {0, 2}
    assert choose_largest([5, 1, 3, 1], 1.0) == {0, 1, 2, 3}
    assert choose_largest([5, 1, 3, 1], 0.0) == choose_largest([], 1.0) == set()


def visiting_forward(rank: int, world: int, address: str, folder: str) -> dict:
    stays = build_engine(rank, world, address, folder, {"tp": 2}, trainable=False)
    visits = build_engine(rank, world, address, folder, {"tp": 2}, trainable=False, cpu_offload=True)
    _, shard = plan(stays, make_batch())
    where = []

    def look(*_) -> None:
        where.append({parameter.untyped_storage().nbytes() == 0 for parameter in visits.module.parameters()})

    look()
    visits.module.register_forward_pre_hook(look)
    found = [stays.forward(shard), visits.forward(shard), visits.forward(shard)]
    look()
    return {"found": found, "where": where, "micro_batches": len(shard.micro_batches())}


def test_a_reference_on_the_host_visits_the_device(two_ranks, make_hf_model):
    ranks = two_ranks.run(visiting_forward, draw_address(), make_hf_model("qwen3", True))
    for rank in ranks:
        assert rank["where"] == [{True}, *[{False}] * 2 * rank["micro_batches"], {True}]
    stays, *visits = next(rank["found"] for rank in ranks if rank["found"][0] is not None)
    for each in visits:
        assert torch.equal(each.logprobs, stays.logprobs) and torch.equal(each.entropy, stays.entropy)


def moved_steps(rank: int, world: int, address: str, folder: str, settings: dict, out: str) -> dict:
    """Weights and logprobs of an engine that stays on its device and of one whose parts leave it before each call;
    bytes that are left there, and what is said of calls out of turn."""
    every = ("weights", "gradients", "optimizer")
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1)
    stays, moves = (build_engine(rank, world, address, folder, settings | {"optimizer": optimizer}) for _ in range(2))
    batch, refused, left = make_batch(), {}, []
    _, shard = plan(stays, batch)

    def count_bytes() -> int:
        (part,) = moves.optimizer.chained_optimizers
        moments = [value for state in part.optimizer.state.values() for value in state.values()]
        masters = part.optimizer.param_groups[0]["params"]
        main_grads = [parameter.main_grad for parameter in moves.module.parameters() if parameter.requires_grad]
        tensors = [*moves.module.parameters(), *masters, *moments, *main_grads]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def refuse(name: str, call, *kept: str) -> None:
        moves.offload([holding for holding in every if holding not in kept])
        with pytest.raises(RuntimeError) as error:
            call()
        refused[name] = str(error.value)
        moves.onload(every)

    def step(engine):
        return engine.train_step(shard, probe_loss, float(batch.mask.sum())).grad_norm

    found = []
    for engine in (stays, moves):
        for number in range(2):
            if engine is moves:
                moves.offload(every)
                moves.offload(every)  # which are there already
                left.append(count_bytes())
                moves.onload(every[:1])
                left.append(count_bytes())
                moves.onload(every)
            norm = step(engine)
            if number == 0:
                engine.save(f"{out}/{engine is moves}")
        if engine is moves:
            moves.offload(every[1:])
        found.append((norm, engine.forward(shard), {name: x.clone() for name, x in engine.export_weights()}))
    moves.onload(every)
    refuse("forward", lambda: moves.forward(shard))
    refuse("step", lambda: step(moves), "weights", "gradients")
    refuse("weights", lambda: list(moves.export_weights()), "optimizer")
    refuse("save", lambda: moves.save(out), "weights")
    refuse("load", lambda: moves.load(f"{out}/True"), "weights", "gradients")
    moves.load(f"{out}/False")
    step(moves)
    again = {name: tensor.clone() for name, tensor in moves.export_weights()}
    return {"found": found, "left": left, "refused": refused, "again": again, "bytes": count_bytes()}


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "pp": 2},
        pytest.param({}, marks=pytest.mark.large),
        pytest.param({"tp": 2, "freeze": ()}, marks=pytest.mark.large),
    ],
    ids=["PP2-bf16", "DP2", "TP2"],
)
def test_what_leaves_the_device_comes_back_as_it_was(two_ranks, make_hf_model, tmp_path, settings):
    for name in ("True", "False"):
        (tmp_path / name).mkdir()
    arguments = draw_address(), make_hf_model("qwen2", True), settings, str(tmp_path)
    for rank in two_ranks.run(moved_steps, *arguments):
        (norm, outputs, weights), (moved_norm, moved_outputs, moved) = rank["found"]
        assert norm == moved_norm > 0
        assert outputs is moved_outputs is None or torch.equal(outputs.logprobs, moved_outputs.logprobs)
        assert weights.keys() == moved.keys() == rank["again"].keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, moved[name]) and torch.equal(tensor, rank["again"][name])
        nothing, some, *_ = rank["left"]
        assert nothing == 0 < some < rank["bytes"] and rank["left"][2] == 0
        assert "forward was called while weights were offloaded" in rank["refused"]["forward"]
        assert "backward was called while optimizer were offloaded" in rank["refused"]["step"]
        assert "export_weights was called while weights were" in rank["refused"]["weights"]
        assert "save was called while optimizer were" in rank["refused"]["save"]
        assert "load was called while optimizer were" in rank["refused"]["load"]


def repeated(rank: int, world: int, addresses: tuple[str, str], folder: str) -> dict:
    """What a process is set to, and the gradient norm of a step, with and without determinism."""

    platform, found = start_process(rank), []
    with (
        patch.dict(os.environ),
        patch.object(type(platform), "get_deterministic_env", lambda self: {"NUMBERS_REPEAT": "1"}),
    ):
        for deterministic, address in zip((True, False), addresses, strict=True):
            leave_groups()
            os.environ.pop("NUMBERS_REPEAT", None)
            engine = build_engine(rank, world, address, folder, {"deterministic": deterministic})
            _, shard = plan(engine, make_batch())
            result = engine.train_step(shard, probe_loss, 7.0)
            settings = torch.are_deterministic_algorithms_enabled(), engine.transformer.deterministic_mode
            found.append((settings, os.environ.get("NUMBERS_REPEAT"), result.grad_norm))
        leave_groups()
    return {"found": found}


def test_determinism_is_set_and_taken_back(one_rank, make_hf_model):
    (rank,) = one_rank.run(repeated, (draw_address(), draw_address()), make_hf_model("qwen2", False))
    (on, variable, norm), (off, without, plain) = rank["found"]
    assert on == (True, True) and off == (False, False)
    assert variable == "1" and without is None
    assert norm == pytest.approx(plain, rel=1e-5) and norm > 0
