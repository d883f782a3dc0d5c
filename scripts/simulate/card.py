"""Measure steps of real sizes on one device, beside their plan, their run in shapes and their forecast.

    python -m scripts.simulate.card --platform cuda [--cases 0.5B 3B ...] [--machine h100] [--json FILE]

It needs what scripts/device_check.py needs, and no folder: weights are drawn. Each case is a rank of its own in bf16,
with sequences of 1,024 tokens of which a quarter is not scored; a case takes up to 65 GB. Bytes are those of the second
step, beyond what libraries hold; on a CPU they are not measured. Seconds are medians of the three steps after it.
"""

import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from engines.batch.batch import TrainBatch
from engines.batch.shard import Shard
from engines.config import LoraConfig, MegatronConfig
from engines.megatron.memory.activations import MicroBatch
from engines.megatron.memory.estimate import compute_rank_memory
from engines.models.spec import ModelSpec
from hardware.machines import MACHINES, Machine
from hardware.platforms import DEFAULT_PLATFORM, PLATFORMS, get_platform
from rlworker.checks.plan.forecast import compute_seconds
from rlworker.checks.plan.work import Tokens, Work, count_passes
from rlworker.checks.shapes.case import RankCase
from rlworker.checks.shapes.run import run_cases
from rlworker.config.memory import GB
from scripts.bench.timing import make_parser, write_figures

_BASE = {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_SHAPE = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_EXPERTS = {"model_type": "qwen3_moe", "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128}
_EXPERTS |= {"num_experts_per_tok": 8, "norm_topk_prob": True}


def _make_config(*sizes: int, vocab: int, tied: bool) -> dict[str, Any]:
    shape = dict(zip(_SHAPE, sizes, strict=True))
    return _BASE | shape | {"vocab_size": vocab, "tie_word_embeddings": tied}


QWEN_05B = _make_config(24, 896, 4864, 14, 2, vocab=151936, tied=True)
QWEN_3B = _make_config(36, 2048, 11008, 16, 2, vocab=151936, tied=True)
QWEN_7B = _make_config(28, 3584, 18944, 28, 4, vocab=152064, tied=False)
QWEN3_30B = _make_config(48, 2048, 6144, 32, 4, vocab=151936, tied=False) | _EXPERTS


@dataclass(frozen=True)
class Size:
    """A case: config.json of its model, and sizes of its step; ``sequences`` are those of each micro-batch."""

    model: dict[str, Any]
    sequences: int
    micro_batches: int
    recompute: str = "none"
    lora: LoraConfig = field(default_factory=LoraConfig)
    length: int = 1024


_EVERY, _ATTENTION = LoraConfig(rank=16), LoraConfig(rank=16, targets=("attention",))
CASES = {
    "0.5B": Size(QWEN_05B, 16, 1),
    "0.5B, recomputed": Size(QWEN_05B, 16, 1, "full"),
    "0.5B, adapters": Size(QWEN_05B, 16, 1, lora=_EVERY),
    "3B, recomputed": Size(QWEN_3B, 16, 2, "full"),
    "7B, adapters": Size(QWEN_7B, 8, 2, lora=_EVERY),
    "7B, adapters, recomputed": Size(QWEN_7B, 16, 2, "full", _EVERY),
    "30B-A3B, adapters, recomputed": Size(QWEN3_30B, 8, 2, "full", _ATTENTION),
}
_TINY = _make_config(2, 64, 128, 4, 2, vocab=512, tied=True)
_WARM_UP, _STEPS = 2, 3


def make_case(size: Size, folder: Path, platform: str) -> RankCase:
    """Make the rank of a case, whose config.json is written to ``folder``."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(size.model))
    slots = size.sequences * size.length
    config = MegatronConfig(
        dtype="bfloat16", share="none", recompute=size.recompute, lora=size.lora, micro_batch_tokens=slots
    )
    return RankCase(ModelSpec.from_folder(folder), config, platform, 0, size.length, size.sequences, size.micro_batches)


class DrawnFolder:
    """The weights of a folder that has none: norms are 1, the others normal with a deviation of 0.02."""

    def __init__(self, model: ModelSpec, device: torch.device):
        self.model, self.device, self.names = model, device, model.list_hf_names()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = torch.ones(self.model.find_hf_shape(name), dtype=torch.bfloat16, device=self.device)
        return weight if name.endswith("norm.weight") else weight.normal_(0, 0.02)

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Return ``count`` rows of a tensor."""
        return self[name][start : start + count]


def measure(case: RankCase) -> dict[str, float]:
    """Measure steps of a rank in this process: seconds of their passes and, on an accelerator, their peak in bytes."""
    platform = get_platform(case.platform)
    os.environ.update(platform.get_train_env())
    from rlworker.checks.device.report import Device

    device = Device(platform, platform.init_process(0))
    from engines.megatron import weights
    from rlworker.checks.device.engine import build_engine, count_libraries, joined_process
    from rlworker.checks.shapes.rank import compute_loss, list_held

    reader: Any = weights
    reader.SafetensorsFolder = lambda _: DrawnFolder(case.model, device.device)
    reader.check_tensors = lambda *_: None  # no file could differ
    module: Any = None if device.is_host else torch.get_device_module(device.device)
    rows, generator = case.sequences * case.micro_batches, torch.Generator().manual_seed(0)
    ids = torch.randint(3, case.model.vocab, (rows, case.length), generator=generator)
    batch = TrainBatch.from_ids(ids.tolist(), [case.length // 4] * rows)
    batch = replace(batch, advantages=torch.ones(batch.num_tokens))
    shard = Shard(batch, (case.sequences,) * case.micro_batches, 0, 0, 0)
    seconds, peaks, start = [], {}, 0.0
    with joined_process(device):
        libraries = count_libraries(device) if module else 0
        engine = build_engine(device, case.model, case.config)
        step = engine.optimizer.step

        def timed_step():
            device.synchronize()
            seconds.append(time.perf_counter() - start)
            if module:
                peaks["passes"] = module.max_memory_allocated()
                module.reset_peak_memory_stats()
            return step()

        engine.optimizer.step = timed_step
        for number in range(_WARM_UP + _STEPS):
            device.synchronize()
            before = module.memory_allocated() if module else 0
            if module:
                module.reset_peak_memory_stats()
            start = time.perf_counter()
            engine.train_step(shard, compute_loss, 1.0)
            if module and number == 1:
                held = sum(list_held(engine).values())
                stepping = module.max_memory_allocated() - libraries - held
                peaks["total"] = held + max(peaks["passes"] - before, stepping)
    return {"seconds": statistics.median(seconds[_WARM_UP:]), "total": peaks.get("total", 0)}


def count_work(case: RankCase) -> Work:
    """Count the work of the passes of a rank, of whose tokens a quarter is not scored."""
    slots = case.length * case.sequences * case.micro_batches
    tokens = Tokens(case.micro_batches, slots, slots * case.length / 2, slots * 3 / 4, slots)
    return count_passes(case.model, case.config, get_platform(case.platform), case.stage, tokens, True)


def forecast(case: RankCase, machine: Machine) -> float:
    """Forecast the seconds of the passes of a rank."""
    return compute_seconds(machine, count_work(case), case.config.dtype, {})


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--platform", choices=PLATFORMS, default=DEFAULT_PLATFORM)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], metavar="CASE")
    parser.add_argument("--machine", choices=MACHINES, default="h100", help="whose step is forecast")
    options = parser.parse_args()
    cases = {"tiny": Size(_TINY, 4, 2, length=64)} if options.tiny else {name: CASES[name] for name in options.cases}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, (title, size) in enumerate(cases.items()):
            case = make_case(size, Path(name) / str(number), options.platform)
            kernels = get_platform(case.platform).kernel_memory
            micro = MicroBatch(size.length * size.sequences, size.sequences)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                found = process.submit(measure, case).result()
            row: dict[str, str | int | float] = {
                "case": title,
                "GB": found["total"] / GB,
                "GB in shapes": run_cases([case])[0].total / GB,
                "GB planned": compute_rank_memory(case.model, case.config, 0, 0, micro, kernels).total / GB,
                "s": found["seconds"],
                "s forecast": forecast(case, MACHINES[options.machine]),
            }
            print("  ".join(f"{key} {value:.4g}" if key != "case" else str(value) for key, value in row.items()))
            rows.append(row)
    write_figures(options.json, rows)


if __name__ == "__main__":
    main()
