"""Tiny models of random weights, made where no real one is at hand: to check with, and to try recipes with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the kinds are named by settings, which are read before anything takes the time to import torch
    from transformers import PreTrainedModel

TinyVlm = Literal["qwen2_5_vl", "qwen3_vl", "gemma3"]
Tiny = Literal["qwen2", TinyVlm]
"""HF model_type of a tiny model."""

IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""Qwen's names for the tokens of images: start, image, end, video."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LANGUAGE: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"depth": 2, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
}
_GEMMA_LANGUAGE: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,  # the scores' scale is not that of the head's size
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "pad_token_id": None,
}
_GEMMA_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "vision_use_head": False,
}
_PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
_PATCH, _MERGE = 14, 2
_RELEASED: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen2_5_vl": ((r"^model\.visual\.", "visual."),),
    "qwen3_vl": (),
    "gemma3": ((r"^model\.", ""), (r"^vision_tower\.(vision_model\.)*", "vision_tower.vision_model.")),
}
"""Of each family, patterns of names as a version of transformers may save them, and those of the released folders."""
LARGE_WEIGHTS = {"initializer_range": 0.08}
"""A setting of either tower that makes attention sharp, four times what transformers takes by itself."""


def make_tiny_model(folder: str | Path, kind: Tiny) -> str:
    """Save a model whose weights are large enough that a wrong one would show."""
    if kind == "qwen2":
        return make_tiny_text(folder, kind, 131)
    return make_tiny_vlm(folder, kind, make_bare_tokenizer(), 131, language=LARGE_WEIGHTS, vision=LARGE_WEIGHTS)


def make_tiny_text(folder: str | Path, family: str, vocab: int, *, tied: bool = True, **settings: Any) -> str:
    """Save a language model alone, without a tokenizer. Its weights are large enough that a wrong one would show.

    Args:
        family: HF model_type. settings: of its config that differ.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _seed(0)
    settings = _LANGUAGE | LARGE_WEIGHTS | settings
    config = AutoConfig.for_model(family, vocab_size=vocab, tie_word_embeddings=tied, **settings)
    return save_apart(AutoModelForCausalLM.from_config(config), folder)


def make_bare_tokenizer(first: int = 0) -> Any:
    """Make a tokenizer of an end token, 0, and the tokens of images, from ``first + 1`` on; it has no words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0} | {token: first + i for i, token in enumerate(IMAGE_TOKENS, start=1)}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    special = dict(eos_token="<eos>", unk_token="<eos>", additional_special_tokens=list(IMAGE_TOKENS))
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **special)


def make_tiny_vlm(
    folder: str | Path,
    family: str,
    tokenizer: Any,
    vocab: int,
    *,
    seed: int = 0,
    tied: bool = True,
    language: dict | None = None,
    vision: dict | None = None,
    pixels: tuple[int, int] = (28 * 28, 28 * 28 * 64),
    apart: float = 0.1,
) -> str:
    """Save a vision-language model with its tokenizer, which has ``IMAGE_TOKENS``, and its image processor.

    Args:
        language, vision: settings of both towers that differ. pixels: fewest and most of an image.
        apart: how far biases and norms, which are born alike, are moved from there: a swapped pair would go unseen.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    if family == "gemma3":
        return _make_tiny_gemma(folder, tokenizer, vocab, seed, tied, language or {}, vision or {}, apart)
    rope, heads = _ROPE | {"mrope_section": [8, 4, 4]}, {}
    if family == "qwen3_vl":
        rope, heads = rope | {"mrope_interleaved": True}, {"head_dim": 32}
    start, image, end, video = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS)
    ends = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    text = _LANGUAGE | {"vocab_size": vocab, "rope_parameters": rope} | ends | heads
    tower = dict(hidden_size=64, intermediate_size=48, num_heads=2, patch_size=_PATCH, spatial_merge_size=_MERGE)
    text |= language or {}
    tower |= _VISION[family] | {"out_hidden_size": text["hidden_size"]} | (vision or {})
    _seed(seed)
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=tower,
        vision_start_token_id=start,
        image_token_id=image,
        vision_end_token_id=end,
        video_token_id=video,
        tie_word_embeddings=tied,
    )
    saved = save_apart(AutoModelForImageTextToText.from_config(config), folder, apart)
    _name_as_released(saved, family)
    tokenizer.save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": _PROCESSORS[family],
        "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
        "patch_size": _PATCH,
        "temporal_patch_size": 2,
        "merge_size": _MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    return saved


def _make_tiny_gemma(
    folder: str | Path, tokenizer: Any, vocab: int, seed: int, tied: bool, language: dict, vision: dict, apart: float
) -> str:
    """Save a Gemma 3 with images."""
    import torch
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessor,
        Gemma3Processor,
        PreTrainedTokenizerFast,
    )

    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
    start, image, end, _ = IMAGE_TOKENS
    names = {"boi_token": start, "image_token": image, "eoi_token": end}
    named = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token,
        chat_template=tokenizer.chat_template,
        extra_special_tokens=names,
    )
    start_id, image_id, end_id = (named.vocab[token] for token in (start, image, end))
    ends = dict(bos_token_id=named.bos_token_id, eos_token_id=named.eos_token_id)
    text = _LANGUAGE | _GEMMA_LANGUAGE | {"vocab_size": vocab} | ends | language
    tower = _GEMMA_VISION | vision
    _seed(seed)
    config = Gemma3Config(
        text_config=text,
        vision_config=tower,
        mm_tokens_per_image=4,
        boi_token_index=start_id,
        eoi_token_index=end_id,
        image_token_index=image_id,
        tie_word_embeddings=tied,
    )
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mm_input_projection" in name:  # born zero
                parameter.normal_(0, 0.3)
            elif "vision_tower" in name and parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    saved = save_apart(model, folder, apart)
    _name_as_released(saved, "gemma3")
    side = tower["image_size"]
    images = Gemma3ImageProcessor(size={"height": side, "width": side}, do_pan_and_scan=False)
    Gemma3Processor(images, named, image_seq_length=4, chat_template=tokenizer.chat_template).save_pretrained(folder)
    return saved


def _name_as_released(folder: str, family: str) -> None:
    """Rename weights as in the released folders, which transformers and vLLM read.

    transformers 5 saves other names: 5.5 puts ``model.`` before Qwen2.5-VL's tower and before all of Gemma 3, whose
    tower is within one too many; 5.19 leaves out what Gemma's tower is within.
    """
    from safetensors.torch import load_file, save_file

    path = Path(folder, "model.safetensors")
    weights = {}
    for name, tensor in load_file(path).items():
        for saved, released in _RELEASED[family]:
            name = re.sub(saved, released, name)
        weights[name] = tensor
    save_file(weights, path, metadata={"format": "pt"})


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def save_apart(model: PreTrainedModel, folder: str | Path, apart: float = 0.1) -> str:
    """Save a fresh model, its biases and norms moved apart: they are born alike, and a swapped pair would go unseen."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "ln_q" in name:
                parameter.add_(apart * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)
