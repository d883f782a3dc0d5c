"""Images and batches of vision-language models, and what the ranks of their tests run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from support.ranks.engines_cases import build_engine, gather_logits, plan
from support.rollout_workers import Prompt

from engines.batch.batch import TrainBatch
from engines.images.columns import make_image_columns
from engines.images.placeholders import make_placeholders
from engines.images.processor import ImageProcessor
from rlworker.checks.reference.huggingface import probe_loss

QWEN2_5_VL_7B = json.loads("""{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "image_token_id": 151655,
    "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 128000, "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768,
    "use_sliding_window": false, "tie_word_embeddings": false, "vocab_size": 152064,
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
        "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2, "temporal_patch_size": 2}}""")
"""The config.json of Qwen2.5-VL-7B: older than ``text_config``, its language model's keys among the others."""
QWEN3_VL_30B = json.loads("""{"architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655,
    "model_type": "qwen3_vl_moe", "tie_word_embeddings": false, "video_token_id": 151656,
    "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "text_config": {"attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "vocab_size": 151936},
    "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
        "num_position_embeddings": 2304, "out_hidden_size": 2048, "spatial_merge_size": 2,
        "temporal_patch_size": 2}}""")
"""The config.json of Qwen3-VL-30B-A3B, without what no engine reads."""
QWEN3_5_35B: dict = json.loads("""{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056,
    "model_type": "qwen3_5_moe", "tie_word_embeddings": false, "video_token_id": 248057,
    "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "text_config": {"attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": false, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "use_cache": true,
        "vocab_size": 248320},
    "vision_config": {"deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
        "model_type": "qwen3_5_moe", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}""")
"""The config.json of Qwen3.5-35B-A3B and Qwen3.6-35B-A3B."""
IMAGE_SIZES = ((84, 56), (56, 28), (140, 112), (28, 28), (100, 75), (301, 240))
"""Width and height of each image: one of a single token, one of several attention windows, one that is resized to
whole patches, and one that is made smaller because it is over the limit."""
VIDEO_SHAPES = ((4, (84, 56)), (13, (28, 56)), (7, (28, 28)))
"""Frames of each video, and their width and height: one longer than it is wide or high, of an odd number of frames."""
ROWS = ((), (0,), (1, 2, 3), (), (0,), (4, 5))
"""Images of each sequence: none, one and three; one image is in two sequences."""


def make_images(folder) -> list[str]:
    generator, paths = np.random.default_rng(0), []
    for number, (width, height) in enumerate(IMAGE_SIZES):
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        paths.append(str(Path(folder, f"{number}.{'jpg' if number == 4 else 'png'}")))
        Image.fromarray(pixels).save(paths[-1])
    return paths


def make_videos(folder) -> list[dict]:
    """Save videos, and return how each is opened: a file and a folder of frames."""
    generator, opened = np.random.default_rng(3), []
    for number, (frames, (width, height)) in enumerate(VIDEO_SHAPES):
        pixels = generator.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
        first, *others = [Image.fromarray(frame) for frame in pixels]
        path = Path(folder, f"video {number}")
        if number % 2:
            path.mkdir()
            for place, frame in enumerate([first, *others]):
                frame.save(path / f"{place}.png")
            opened.append({"path": str(path), "fps": 3.0, "frames": tuple(range(0, frames, 2))})
        else:
            first.save(path, "WEBP", save_all=True, append_images=others, duration=150, lossless=True)
            opened.append({"path": str(path), "frames": tuple(range(frames))})
    return opened


def open_shown(processor, path, place: str):
    """Open an image by its path, or a video by how ``make_videos`` says."""
    return processor.videos.open(place=place, **path) if isinstance(path, dict) else processor.open(path, place)


def make_prompts(model, paths, rows=ROWS, seed: int = 1):

    processor, generator = ImageProcessor(model.folder, model.vision), torch.Generator().manual_seed(seed)
    text = lambda count: torch.randint(10, 85, (count,), generator=generator).tolist()  # noqa: E731
    prompts = []
    for row, numbers in enumerate(rows):
        images = tuple(open_shown(processor, paths[n], f"row {row}, image {i}") for i, n in enumerate(numbers))
        ids = text(2 + row)
        for image in images:
            ids += [*make_placeholders([image], model), *text(row % 4)]  # the fifth row ends in an image
        prompts.append(Prompt(tuple(ids), images))
    return prompts


def make_vlm_batch(model, paths, rows=ROWS, seed: int = 1):
    """Make a batch that goes on from ``make_prompts`` with a few random ids, which count, and advantages."""

    prompts, generator = make_prompts(model, paths, rows, seed), torch.Generator().manual_seed(seed)
    text = lambda count: torch.randint(10, 85, (count,), generator=generator).tolist()  # noqa: E731
    sequences = [[*prompt.token_ids, *text(3 + row % 3)] for row, prompt in enumerate(prompts)]
    columns = make_image_columns(sequences, [prompt.images for prompt in prompts], model.vision)
    batch = TrainBatch.from_ids(sequences, [len(prompt.token_ids) for prompt in prompts], **columns)
    return dataclasses.replace(batch, advantages=torch.randn(batch.num_tokens, generator=generator))


def rename(name: str) -> str:
    """Return a weight's name without what differs between transformers' modules and its saved folders."""
    return name.replace("language_model.", "").replace("vision_model.", "").removeprefix("model.")


def name_part(name: str) -> str:
    if "merger" in name or "multi_modal_projector" in name:
        return "projector"
    if name.endswith(".mlp.gate.weight"):
        return "router"
    return "vision" if "visual." in name or "vision_tower." in name else "language"


def run_vlm_case(
    rank: int, world: int, address: str, folder: str, paths, settings: dict, platform: str = "cpu", rows=ROWS
) -> dict:
    """Compute logits, logprobs and gradients of one parallel configuration, and the weights after some ``steps``."""
    budget, steps = settings.get("budget"), settings.get("steps", 0)
    own = {name: x for name, x in settings.items() if name not in ("budget", "steps")}
    engine = build_engine(rank, world, address, folder, own, platform)
    if budget and "vision" in engine.extensions:
        engine.extensions["vision"].budget = budget
    from engines.probes.megatron import gather_gradients

    batch, decoded = make_vlm_batch(engine.model, paths, rows), []
    if "vision" in engine.extensions:
        patches = engine.extensions["vision"].processor.patches
        engine.extensions["vision"].processor.patches = lambda images: (decoded.append(len(images)), patches(images))[1]
    schedule, shard = plan(engine, batch)
    logits, outputs = gather_logits(engine, shard), engine.forward(shard)
    engine.backward(shard, probe_loss, float(batch.mask.sum()))
    gradients = gather_gradients(engine)
    for _ in range(steps):
        engine.train_step(shard, probe_loss, float(batch.mask.sum()))

    return {
        "schedule": schedule,
        "dp_rank": engine.dp_rank,
        "is_leader": engine.is_leader,
        "decoded": decoded,
        "logits": logits,
        "outputs": outputs,
        "gradients": gradients,
        "weights": {name: tensor.clone() for name, tensor in engine.export_weights()} if steps else {},
    }
