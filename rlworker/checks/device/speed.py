"""Measure the speed of attention and of a training step, relative to a matrix product in the same run."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engines.config import MegatronConfig
from engines.megatron.layout import Layout
from engines.models.spec import ModelSpec
from hardware.attention.capabilities import find_backend
from hardware.attention.rules import CAUSAL, Rule
from hardware.platforms import DEFAULT_PLATFORM, get_platform
from rlworker.checks.device.attention import build_core, make_no_rotation
from rlworker.checks.device.engine import build_engine, make_batch, measure_memory, plan_shard
from rlworker.checks.device.report import PEAK_TFLOPS, Device, DeviceFinding
from rlworker.checks.reference.huggingface import probe_loss
from rlworker.checks.tiny.models import make_tiny_text

_SHAPE: dict[str, Any] = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14)
_SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=4096)
_HALF_BILLION = _SHAPE | {"vocab_size": 151936}
"""The shape of Qwen2.5-0.5B."""


def measure_seconds(device: Device, run: Callable[[], Any], repeat: int = 5) -> float:
    """Return the shortest seconds of ``repeat`` calls, after one call that warms up."""
    seconds = []
    for _ in range(1 + repeat):
        device.synchronize()
        start = time.perf_counter()
        run()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def check_speed(device: Device, folder: Path, own: Path | None = None) -> list[DeviceFinding]:
    """Measure a matrix product, attention and a training step. A measurement fails only if it cannot run.

    On a CPU the sizes are tiny: the rows show that the program runs, and the numbers mean nothing.

    Args:
        folder: folder for a model of the shape of Qwen2.5-0.5B. own: HuggingFace folder of the model to train instead.
    """
    side = 256 if device.is_host else 8192
    a, b = (torch.randn(side, side, device=device.device, dtype=torch.bfloat16) for _ in range(2))
    findings, product = [], 2 * side**3 / measure_seconds(device, lambda: a @ b) / 1e12
    text = f"{product:.3g} TFLOP/s"
    findings.append(device.make_finding("speed", "matrix product", product > 0, text, {"TFLOP/s": product}))
    findings += measure_attention(device, product)
    shape: dict[str, Any] = {"max_position_embeddings": 256} if device.is_host else dict(_HALF_BILLION)
    model = own or Path(make_tiny_text(folder / "step", "qwen2", shape.pop("vocab_size", 128), **shape))
    return [*findings, measure_step(device, model, product)]


def measure_attention(device: Device, product: float) -> list[DeviceFinding]:
    """Measure causal attention of one sequence by the platform's core and by SDPA, forward and backward.

    The last finding is the share of time that bidirectional images add to a pack.

    Args:
        product: TFLOP/s of the matrix product.
    """
    tokens, heads, kv_heads, dim = (128, 4, 2, 16) if device.is_host else (8192, 16, 16, 128)
    dtype, findings = torch.bfloat16, []
    flops = 2 * tokens**2 * heads * dim  # two products of [tokens, dim]; half of the pairs are visible
    drawn = [torch.randn(tokens, h, dim, device=device.device, dtype=dtype) for h in (heads, kv_heads, kv_heads)]
    query, key, value = (x.requires_grad_() for x in drawn)
    layout = Layout.build((tokens,), "thd", device=device.device)
    rotary = make_no_rotation(layout, dtype, device.device, dim)
    sizes = dict(heads=heads, kv_heads=kv_heads, dim=dim)
    cores = {}
    # The default platform attends to one sequence by one call of SDPA, on any device.
    for name, platform in (("core attention", device.platform), ("SDPA", get_platform(DEFAULT_PLATFORM))):
        inputs = platform.build_attention_inputs(layout.build_mask_spec((CAUSAL,)), rotary)
        cores[name] = partial(build_core(platform, **sizes), query, key, value, None, packed_seq_params=inputs)
    for name, forward in cores.items():
        output = forward()
        gradient = torch.ones_like(output)
        backward = lambda output=output, gradient=gradient: torch.autograd.grad(  # noqa: E731
            output, (query, key, value), gradient, retain_graph=True
        )
        for way, run, count in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
            rate = count / measure_seconds(device, run) / 1e12
            text = f"{rate:.3g} TFLOP/s, {rate / product:.0%} of the matrix product's; causal, {tokens} tokens, "
            text += f"{heads} heads of {dim}, bf16"
            findings.append(device.make_finding("speed", f"{name}, {way}", rate > 0, text, {"TFLOP/s": rate}))
    core = build_core(device.platform, **sizes)
    return [*findings, _measure_images(device, query, key, value, core, rotary)]


def _measure_images(device: Device, query, key, value, core, rotary) -> DeviceFinding:
    """Measure the share of a forward pass that images take in a pack in which half of the tokens are an image's."""
    tokens, where = len(query), "image pack, second call"
    lengths, rule = (tokens // 4,) * 4, Rule(images=True)
    try:
        find_backend(device.platform.attention_backends, "thd", 1, rule)
    except ValueError:
        return device.refuse("speed", where, "no backend of the platform honours images in a pack")
    layout = Layout.build(lengths, "thd", device=device.device)
    blocks = torch.tensor([index // 32 if index % 64 < 32 else -1 for index in range(tokens)])
    specs = layout.build_mask_spec((CAUSAL,)), layout.build_mask_spec((rule,), blocks)
    seconds = []
    for spec in specs:
        inputs = device.platform.build_attention_inputs(spec, rotary)
        run = lambda inputs=inputs: core(query, key, value, None, packed_seq_params=inputs)  # noqa: E731
        seconds.append(measure_seconds(device, run))
    share = 1 - seconds[0] / seconds[1]
    text = f"{share:.0%} of {1e3 * seconds[1]:.2f} ms is what images add to a causal pack of {tokens} tokens"
    return device.make_finding("speed", where, True, text, {"share": share})


def measure_step(device: Device, folder: Path, product: float) -> DeviceFinding:
    """Measure a training step in bf16: seconds, TFLOP/s, and peak memory beside the plan.

    Args:
        folder: HuggingFace folder of the model. product: TFLOP/s of the matrix product.
    """
    sequences, tokens, micro_batches = (4, 32, 2) if device.is_host else (8, 1024, 2)
    model = ModelSpec.from_folder(folder)
    config = MegatronConfig(dtype="bfloat16", micro_batch_tokens=sequences * tokens)
    memory = measure_memory(device, model, config, sequences, tokens)
    engine = build_engine(device, model, config)
    shard = plan_shard(engine, make_batch(model, micro_batches * sequences, tokens))
    seconds = measure_seconds(device, lambda: engine.train_step(shard, probe_loss, 1.0), repeat=3)
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    count = micro_batches * sequences * tokens
    rate = model.count_training_flops([tokens] * (micro_batches * sequences)) / seconds / 1e12
    name = device.describe()["device"]
    peak = next((peak for card, peak in PEAK_TFLOPS.items() if card in name), None)
    text = f"{seconds:.3f} s for {count} tokens, {parameters / 1e6:.1f} M parameters: {rate:.3g} TFLOP/s, "
    text += f"{rate / product:.0%} of the matrix product's"
    text += f", MFU {rate / peak:.1%}" if peak else ""
    (kind, measured), (_, planned) = memory.items()
    text += f"; {kind} {measured / 2**30:.2f} GiB, planned {planned / 2**30:.2f}"
    figures = {"seconds": seconds, "TFLOP/s": rate, f"{kind} GiB": measured / 2**30, "planned GiB": planned / 2**30}
    figures |= {"MFU": rate / peak} if peak else {}
    return device.make_finding("speed", "training step", seconds > 0, text, figures)
