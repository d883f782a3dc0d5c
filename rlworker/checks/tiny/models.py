"""Make tiny models of random weights, to check with and to try recipes with where there is no real model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from rlworker.checks.tiny.states import (
    PARTLY_TURNED,
    STATE_EXPERTS,
    STATE_MODELS,
    STATES,
    build_model,
    spell_spaces_as_bytes,
)

if TYPE_CHECKING:  # the kinds are named by settings, which are read before anything takes the time to import torch
    from transformers import PreTrainedModel

TinyVlm = Literal["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "internvl"]
TinyState = Literal["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]
TinyText = Literal["qwen2", "mistral", "phi3", "glm4", "qwen2_moe", "qwen3_moe", "glm4_moe", TinyState]
Tiny = Literal[TinyText, TinyVlm]
"""HuggingFace model_type of a tiny model."""
VIDEO_FAMILIES: tuple[TinyVlm, ...] = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families that are shown videos; all have Qwen3-VL's processor."""

IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""Qwen's tokens for images: start, image, end and video."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HEADS, _HEAD_DIM = 4, 32
"""Attention heads of a tiny model, and the size of each."""
_LANGUAGE: dict[str, Any] = dict(
    hidden_size=_HEADS * _HEAD_DIM,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=_HEADS,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GLM_EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GLM_EXPERTS |= {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
"""Experts of a tiny GLM-4.5, in which each part of the choice among them shows."""
_TEXT: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "mistral": {"sliding_window": 24},
    "phi3": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},  # its own are beyond a tiny vocabulary
    "glm4": {"head_dim": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": {"head_dim": 32} | _EXPERTS,
    "glm4_moe": GLM_EXPERTS | {"tied": False, "head_dim": 32, "attention_bias": True, "use_qk_norm": True},
    **STATE_MODELS,
    "qwen3_next": {"tied": False} | STATE_MODELS["qwen3_next"],
}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"depth": 2, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen2_vl": {"depth": 2},
    "qwen3_vl": {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
}
_VISION |= {"qwen3_vl_moe": _VISION["qwen3_vl"], "qwen3_5": {"depth": 2, "num_position_embeddings": 16}}
_VISION |= {"qwen3_5_moe": _VISION["qwen3_5"]}
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
_INTERN_VISION = _GEMMA_VISION | {"attention_bias": True, "layer_scale_init_value": 0.5}
del _INTERN_VISION["vision_use_head"]
_PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen2_vl": "Qwen2VLProcessor"}
_PROCESSORS |= dict.fromkeys(VIDEO_FAMILIES, "Qwen3VLProcessor")
_IMAGE_STATES: tuple[TinyVlm, ...] = ("qwen3_5", "qwen3_5_moe")
"""Families with images of which most layers have a state."""
_PATCH, _MERGE = 14, 2
_FULL_FRAMES = 4
"""Number of video frames that may each have as many pixels as an image."""
_TIME_CHARACTERS = "<.0123456789> second"
_RELEASED: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen2_5_vl": ((r"^model\.visual\.", "visual."),),
    "qwen2_vl": ((r"^model\.visual\.", "visual."),),
    "gemma3": ((r"^model\.", ""), (r"^vision_tower\.(vision_model\.)*", "vision_tower.vision_model.")),
    "internvl": ((r"^model\.", ""), (r"^lm_head\.", "language_model.lm_head.")),
    "qwen3_5": ((r"^model\.language_model\.visual\.", "model.visual."),),
    "qwen3_5_moe": ((r"^model\.language_model\.visual\.", "model.visual."),),
    "qwen3_5_text": ((r"^model\.language_model\.", "model."),),
    "qwen3_5_moe_text": ((r"^model\.language_model\.", "model."),),
}
"""Family -> patterns of weight names that versions of transformers save, and the released folders' names."""
_NEWLINES = tuple("\n" * count for count in range(1, 5))
"""Tokens around Gemma's images, with low ids; random text has larger ids, so none beside an image."""
LARGE_WEIGHTS = {"initializer_range": 0.08}
"""A setting of both towers that makes attention sharp: four times transformers' default."""


def make_tiny_model(folder: str | Path, kind: Tiny, head_dims: Sequence[int] = (_HEAD_DIM,)) -> str:
    """Save a tiny model and return its folder. Its weights are so large that a wrong weight changes the outputs.

    Args:
        head_dims: sizes of an attention head that will do; the smallest from 32 on is taken.
    """
    head_dim = min((size for size in head_dims if size >= _HEAD_DIM), default=_HEAD_DIM)
    sizes: dict[str, Any] = {}
    if head_dim != _HEAD_DIM:
        sizes = {"head_dim": head_dim, "hidden_size": _HEADS * head_dim}
    if kind in _TEXT:
        return make_tiny_text(folder, kind, 131, **_TEXT[kind] | sizes)
    language = LARGE_WEIGHTS | sizes
    return make_tiny_vlm(folder, kind, make_bare_tokenizer(), 131, language=language, vision=LARGE_WEIGHTS)


def make_tiny_family(folder: str | Path, family: str, head_dims: Sequence[int] = (_HEAD_DIM,)) -> str:
    """Save a tiny model of a family and return its folder: by the settings here, or by its config's defaults.

    Args:
        family: HuggingFace model_type. head_dims: as of ``make_tiny_model``.
    """
    if family in get_args(TinyText) or family in get_args(TinyVlm):
        return make_tiny_model(folder, cast(Tiny, family), head_dims)
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(family)
    settings: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    settings |= {"head_dim": _HEAD_DIM} if hasattr(defaults, "head_dim") else {}
    return make_tiny_text(folder, family, 131, tied=bool(defaults.tie_word_embeddings), **settings)


def make_tiny_text(folder: str | Path, family: str, vocab: int, *, tied: bool = True, **settings: Any) -> str:
    """Save a tiny language model without a tokenizer and return its folder. A wrong weight changes its outputs.

    Args:
        family: HuggingFace model_type. vocab: number of tokens.
        tied: whether input and output embeddings are the same. settings: settings of the config that differ.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _seed(0)
    settings = _LANGUAGE | LARGE_WEIGHTS | settings
    config = AutoConfig.for_model(family, vocab_size=vocab, tie_word_embeddings=tied, **settings)
    saved = save_apart(build_model(AutoModelForCausalLM, config), folder)
    if family in _RELEASED:
        _name_as_released(saved, family)
    return saved


def make_bare_tokenizer(first: int = 0) -> Any:
    """Make a tokenizer of an end token (id 0), image tokens (ids from ``first + 1``), newlines, and the characters of
    video times. It has no other tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0} | {token: first + i for i, token in enumerate(IMAGE_TOKENS, start=1)}
    free = (number for number in count(1) if number not in words.values())
    words |= dict(zip([*_NEWLINES, *_TIME_CHARACTERS], free))
    tokens = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens.decoder = decoders.Fuse()  # vLLM 0.23 writes a video's times as text, and reads them back
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
    fused: bool = True,
) -> str:
    """Save a vision-language model with its tokenizer and image processor, and return the folder.

    Args:
        tokenizer: must have ``IMAGE_TOKENS``. vocab: number of tokens.
        tied: whether input and output embeddings are the same.
        language, vision: settings of the two towers that differ.
        pixels: least and most pixels of an image.
        apart: size of random changes to biases and norms, which are equal when new: a swapped pair would go unseen.
        fused: the experts of a Qwen3.5 lie fused, as in the released folders; else as transformers saves them.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    if own := {"gemma3": _make_tiny_gemma, "internvl": _make_tiny_intern}.get(family):
        return own(folder, tokenizer, vocab, seed, tied, language or {}, vision or {}, apart)
    head_dim = (language or {}).get("head_dim", _HEAD_DIM)
    heads: dict[str, Any] = {}
    rope = _ROPE | {"mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8]}
    if family in VIDEO_FAMILIES:
        rope, heads = rope | {"mrope_interleaved": True}, {"head_dim": 32}
    if family == "qwen3_vl_moe":
        heads |= _EXPERTS
    if family in _IMAGE_STATES:
        sections = [count * head_dim // _HEAD_DIM for count in PARTLY_TURNED["mrope_section"]]
        heads |= STATES | {"rope_parameters": rope | PARTLY_TURNED | {"mrope_section": sections}}
        # vLLM 0.23 looks for it here, and would take the 0.25 of the released models.
        heads["partial_rotary_factor"] = PARTLY_TURNED["partial_rotary_factor"]
    if family == "qwen3_5_moe":
        heads |= STATE_EXPERTS
    start, image, end, video = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS)
    ends = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    text = _LANGUAGE | {"vocab_size": vocab, "rope_parameters": rope} | ends | heads
    tower: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=48, num_heads=2, patch_size=_PATCH, spatial_merge_size=_MERGE
    )
    text |= language or {}
    tower |= _VISION[family] | {"out_hidden_size": text["hidden_size"]} | (vision or {})
    if family == "qwen2_vl":  # other names, and an MLP by its ratio
        tower |= {"embed_dim": tower["hidden_size"], "hidden_size": tower.pop("out_hidden_size"), "mlp_ratio": 2}
        del tower["intermediate_size"]
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
    model = build_model(AutoModelForImageTextToText, config)
    # As transformers' module has them, experts are fused as in the released folders; it saves a tensor of each.
    saved = save_apart(model, folder, apart, save_original_format=family != "qwen3_5_moe" or not fused)
    _name_as_released(saved, family)
    tokenizer.save_pretrained(folder)
    if family in _IMAGE_STATES:
        spell_spaces_as_bytes(folder)
    _save_processors(folder, family, pixels, tower["patch_size"])
    return saved


def _save_processors(folder: str | Path, family: str, pixels: tuple[int, int], patch: int) -> None:
    """Save the settings of a Qwen's processors of images, and of videos where it is shown any."""
    settings = {
        "processor_class": _PROCESSORS[family],
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": _MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    kinds = {"preprocessor_config.json": ({"image_processor_type": "Qwen2VLImageProcessor"}, 1)}
    if family in VIDEO_FAMILIES:  # its limits are those of all frames together
        kinds["video_preprocessor_config.json"] = ({"video_processor_type": "Qwen3VLVideoProcessor"}, _FULL_FRAMES)
    for name, (kind, frames) in kinds.items():
        size = {"size": {"shortest_edge": pixels[0], "longest_edge": frames * pixels[1]}}
        (Path(folder) / name).write_text(json.dumps(kind | settings | size, indent=2))


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
    )

    tokenizer.add_tokens([*_NEWLINES])
    start, image, end, _ = IMAGE_TOKENS
    named = _name_tokens(tokenizer, {"boi_token": start, "image_token": image, "eoi_token": end})
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


def _make_tiny_intern(
    folder: str | Path, tokenizer: Any, vocab: int, seed: int, tied: bool, language: dict, vision: dict, apart: float
) -> str:
    """Save a tiny InternVL that cuts large images into tiles; ``language`` is a config of Qwen2 or Qwen3."""
    import torch
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
        InternVLVideoProcessor,
    )

    start, image, end, video = IMAGE_TOKENS
    names = {"start_image_token": start, "context_image_token": image, "end_image_token": end, "video_token": video}
    named = _name_tokens(tokenizer, names)
    ends = dict(bos_token_id=named.bos_token_id, eos_token_id=named.eos_token_id)
    text = {"model_type": "qwen2"} | _LANGUAGE | {"vocab_size": vocab} | ends | language
    tower = _INTERN_VISION | vision
    side = tower["image_size"]
    tokens = (side // tower["patch_size"] // _MERGE) ** 2
    _seed(seed)
    config = InternVLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=named.vocab[image],
        image_seq_length=tokens,
        downsample_ratio=1 / _MERGE,
        tie_word_embeddings=tied,
    )
    model = InternVLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("cls_token", "position_embeddings", "lambda_1", "lambda_2")):  # each born alike
                parameter.add_(0.15 * torch.randn_like(parameter))
    saved = save_apart(model, folder, apart)
    _name_as_released(saved, "internvl")
    size = {"height": side, "width": side}
    images, videos = GotOcr2ImageProcessor(size=size, max_patches=3), InternVLVideoProcessor(size=size)
    processor = InternVLProcessor(images, named, videos, image_seq_length=tokens, chat_template=tokenizer.chat_template)
    processor.save_pretrained(folder)
    return saved


def _name_tokens(tokenizer: Any, names: dict[str, str]) -> Any:
    """Make the same tokenizer, with the token names that transformers' processors look for."""
    from transformers import PreTrainedTokenizerFast

    kept = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template")
    settings = {key: getattr(tokenizer, key) for key in kept}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, extra_special_tokens=names, **settings)


def _name_as_released(folder: str, family: str) -> None:
    """Rename and transpose weights as in the released folders, which transformers and vLLM read.

    transformers 5 saves other names. 5.5 puts ``model.`` before Qwen2.5-VL's tower and before all of InternVL and of
    Gemma 3, ``language_model.`` into those of Qwen3.5's text, and nests Gemma's tower once too often; 5.19 leaves out
    the module around Gemma's tower, and saves experts of Qwen3-VL-MoE as its module has them, which vLLM does not read.
    """
    from safetensors.torch import load_file, save_file

    path = Path(folder, "model.safetensors")
    weights = {}
    for name, tensor in load_file(path).items():
        for saved, released in _RELEASED.get(family, ()):
            name = re.sub(saved, released, name)
        is_turned = family == "qwen3_vl_moe" and ".experts." in name
        weights[name] = tensor.transpose(1, 2).contiguous() if is_turned else tensor
    save_file(weights, path, metadata={"format": "pt"})


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def save_apart(
    model: PreTrainedModel, folder: str | Path, apart: float = 0.1, *, save_original_format: bool = True
) -> str:
    """Save a new model with random changes to its biases and norms, which are equal when new: a swapped pair would go
    unseen. Some biases are buffers.

    Args:
        apart: standard deviation of the changes. save_original_format: as of ``save_pretrained``.
    """
    import torch

    with torch.no_grad():
        for name, parameter in chain(model.named_parameters(), model.named_buffers()):
            if name.endswith("bias") or "norm" in name or "ln_q" in name:
                parameter.add_(apart * torch.randn_like(parameter))
    model.save_pretrained(folder, save_original_format=save_original_format)
    return str(folder)
