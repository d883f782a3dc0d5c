"""The planner's bytes against engines that are built."""

from support.cover import matrix
from support.factors import IMAGE_FAMILIES, TWO_RANKS, settings_of
from support.models import make_vlm
from support.ranks.engines_cases import build_engine
from support.ranks.pool import free_address

MODELS = {
    "qwen2-tied": ("qwen2", True, "language"),
    "qwen3-untied": ("qwen3", False, "language"),
    "llama-critic": ("llama", False, "value"),
}
"""Family, whether its embeddings are tied, and its head."""


def bytes_held(rank: int, world: int, address: str, folder: str, settings: dict, head: str) -> dict:
    """What an engine holds, and what was planned for its rank."""
    import torch
    from megatron.core import parallel_state as mpu

    from engines.megatron.activations import MicroBatch
    from engines.megatron.memory import compute_rank_memory, list_parameters
    from engines.megatron.weights import _name_parameters
    from engines.models.spec import ModelSpec

    model = ModelSpec.from_folder(folder, head)
    engine = build_engine(rank, world, address, model, settings)
    for part in engine.optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
    parts, buffers = engine.optimizer.chained_optimizers, engine.module.buffers
    masters = [shard for part in parts for group in part.shard_fp32_from_float16_groups for shard in group]
    states = [state for part in parts for state in part.optimizer.state.values()]
    kept = [*masters, *(value for state in states for value in state.values())]
    held = {
        "parameters": sum(buffer.param_data.nbytes for buffer in buffers)
        + sum(p.nbytes for p in engine.module.parameters() if not p.requires_grad),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(tensor.nbytes for tensor in kept if isinstance(tensor, torch.Tensor)),
    }
    stage, place = mpu.get_pipeline_model_parallel_rank(), mpu.get_data_parallel_rank(with_context_parallel=True)
    memory = compute_rank_memory(model, engine.config, stage, place, MicroBatch(), engine.platform.kernel_memory)
    planned = vars(memory)
    parameters = [(name, tuple(p.shape)) for name, p in _name_parameters(engine.module.module).items()]
    wanted = [(p.name, p.shape) for p in list_parameters(model, engine.config, stage)]
    planned = {name: planned[name] for name in held}
    return {"held": held, "planned": planned, "parameters": parameters, "wanted": wanted}


@matrix({"size": TWO_RANKS, "model": tuple(MODELS), "dtype": ("float32", "bfloat16")})
def test_planned_bytes_are_those_of_the_engine(two_ranks, make_hf_model, size, model, dtype):
    family, tied, head = MODELS[model]
    folder, settings = make_hf_model(family, tied), settings_of(size)
    for rank in two_ranks.run(bytes_held, free_address(), folder, settings | {"dtype": dtype}, head):
        assert rank["parameters"] == rank["wanted"]
        assert rank["held"] == rank["planned"]


@matrix({"size": TWO_RANKS, "family": IMAGE_FAMILIES})
def test_planned_bytes_of_a_vision_language_model(two_ranks, tmp_path, size, family):
    folder, settings = make_vlm(tmp_path, family), settings_of(size)
    for freeze in ((), ("vision",), ("vision", "projector"), *([("language",)] if "pp" not in settings else [])):
        for rank in two_ranks.run(bytes_held, free_address(), folder, settings | {"freeze": freeze}, "language"):
            assert rank["parameters"] == rank["wanted"]
            assert rank["held"] == rank["planned"], freeze
