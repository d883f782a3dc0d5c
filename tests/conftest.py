"""Fixtures shared by the suite: small saved models, pools of ranks and one Ray instance."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONUNBUFFERED", None)  # it would hide output that is not there when a process is killed

import pytest
import torch
from ranks import Ranks
from support.factors import world_of
from transformers import (
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlworker.cluster import ray_for
from rlworker.tiny_models import save_apart

torch.set_num_threads(1)
pytest_plugins = ["support.costs"]

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 48}),  # not hidden / heads
    # Sliding windows on the upper half of the layers.
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "llama-rope3": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}
VOCAB = 99  # odd, so that tensor parallelism has to pad it


@pytest.fixture(scope="session")
def make_hf_model(tmp_path_factory):
    """``make(family, tied)`` -> folder of a saved model with weights large enough to make attention sharp."""
    made = {}

    def make(family: str, tied: bool) -> str:
        if (family, tied) not in made:
            config_class, model_class, extra = FAMILIES[family]
            torch.manual_seed(0)
            config = config_class(
                vocab_size=VOCAB,
                hidden_size=128,
                intermediate_size=96,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                tie_word_embeddings=tied,
                initializer_range=0.08,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
                **extra,
            )
            folder = tmp_path_factory.mktemp(f"{family}-{'tied' if tied else 'untied'}")
            made[family, tied] = save_apart(model_class(config), folder)
        return made[family, tied]

    return make


@pytest.fixture(scope="session")
def make_critic(make_hf_model, tmp_path_factory):
    """``make(family)`` -> folder of a saved token classification with one label, its body the language model's."""
    made = {}

    def make(family: str) -> str:
        if family not in made:
            model = AutoModelForTokenClassification.from_pretrained(make_hf_model(family, True), num_labels=1)
            torch.nn.init.normal_(model.score.weight, std=0.02)
            torch.nn.init.constant_(model.score.bias, 0.3)
            folder = tmp_path_factory.mktemp(f"{family}-critic")
            model.save_pretrained(folder)
            made[family] = str(folder)
        return made[family]

    return make


@pytest.fixture(scope="session")
def cluster():
    """One Ray for all tests that run actors in this process, with room for the largest of them."""
    with ray_for(5, "cpu"):
        yield


@pytest.fixture(scope="session")
def one_rank():
    pool = Ranks(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks():
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks():
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture
def pool_of(request):
    """``pool_of(size)``: the session's pool of as many ranks as a parallel size takes, such as ``"TP2-CP2"``."""

    def pool(size: str) -> Ranks:
        return request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[world_of(size)])

    return pool
