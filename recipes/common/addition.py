"""A character-level Qwen3, Qwen3-MoE or Qwen3.5 learns two-digit additions in the demos; all are made on the spot.

Without torch and transformers at its top, so that settings are checked before either is imported.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def make_tokenizer(chat_template: str | None = None, further: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token per printable ASCII character, and of ``further`` special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIAL, *map(chr, range(32, 127)), *further])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL))
    special = list(further)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_template, additional_special_tokens=special, **names
    )


_SIZES: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,  # with two, some seeds find the last digit's sum late, and GRPO then learns slowly
    num_key_value_heads=2,
    head_dim=32,  # the least that vLLM takes on a CPU
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=True,
)
_EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True)
"""A token's experts are together as wide as the MLP of the model without experts."""
_STATES: dict[str, Any] = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32)
_STATES |= dict(linear_value_head_dim=32, layer_types=["linear_attention", "full_attention"])


def make_model(folder: Path, seed: int, chat_template: str | None = None) -> Path:
    """Save a Qwen3 of 132 thousand random parameters, with its tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save_model(Qwen3ForCausalLM, Qwen3Config(**_SIZES), folder, seed, chat_template)


def make_expert_model(folder: Path, seed: int, chat_template: str | None = None) -> Path:
    """Save a Qwen3-MoE of 354 thousand random parameters, with its tokenizer: 132 thousand are used for a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return _save_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**_SIZES, **_EXPERTS), folder, seed, chat_template)


def make_state_model(folder: Path, seed: int, chat_template: str | None = None) -> Path:
    """Save a Qwen3.5 of 149 thousand random parameters, with its tokenizer: a layer with a state, one of attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return _save_model(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_SIZES, **_STATES), folder, seed, chat_template)


def _save_model(kind: Any, config: Any, folder: Path, seed: int, chat_template: str | None) -> Path:
    import torch

    torch.manual_seed(seed)
    kind(config).save_pretrained(folder)
    make_tokenizer(chat_template).save_pretrained(folder)
    return folder


def is_heldout(a: int, b: int) -> bool:
    """Tell whether a pair is held out: one in ten is, by a hash, so that no pattern can be learned around."""
    return zlib.crc32(f"{a}+{b}".encode()) % 10 == 0


def make_data(folder: Path) -> Path:
    """Write all additions of two numbers below 100 as train.jsonl and heldout.jsonl."""
    rows: dict[str, list[dict]] = {"train": [], "heldout": []}
    for a, b in ((a, b) for a in range(100) for b in range(100)):
        rows["heldout" if is_heldout(a, b) else "train"].append(
            {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}
        )
    return write_rows(folder, rows)


def write_rows(folder: Path, parts: dict[str, list[dict]]) -> Path:
    """Write the rows of each part, such as ``train``, as a JSONL file of its name, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
