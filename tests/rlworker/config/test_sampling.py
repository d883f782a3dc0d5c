"""Settings of the sampling that need each other, and the text of a sample that a stop text ended."""

import numpy as np
import pytest

from engines.config import VllmConfig
from recipes.common.addition import make_tokenizer
from rlworker.config.run import AlgorithmConfig, RunConfig
from rlworker.environments.codec import Codec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(top_p=0.9), r"top_p=0\.9 keeps as many ids as it takes, .*set --rollout\.top-k too"),
        (dict(min_p=0.1), r"min_p=0\.1 keeps as many ids as it takes"),
        (dict(top_k=1025), "top_k must be from 0 to 1024"),
        (dict(top_k=5, top_p=0.0), "top_p must be above 0 and at most 1"),
        (dict(min_new_tokens=2), "min_new_tokens=2 takes the tokens that end an answer .*set --rollout.top-k"),
        (dict(top_k=5, min_new_tokens=300), "min_new_tokens=300 is above max_new_tokens=256"),
        (dict(stop=("a", "")), "stop has an empty text"),
    ],
)
def test_what_sampling_cannot_do_is_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=f"^rollout: {message}"):
        VllmConfig(**settings)


def test_centering_needs_the_whole_distribution():
    with pytest.raises(ValueError, match=r"score_centering=4 .* rollout\.top_k=20 cuts it"):
        RunConfig(algorithm=AlgorithmConfig(score_centering=4), rollout=VllmConfig(top_k=20))


@pytest.mark.parametrize(
    ("text", "want"),
    [("12ab", "12"), ("1ab2ab", "1ab2"), ("ab12", "ab12"), ("12a", "12a"), ("ENDx1END", "ENDx1"), ("", "")],
)
def test_a_text_is_read_up_to_the_stop_text_at_its_end(text, want):
    """One that stands earlier, before the shortest completion, ended nothing. A character is a token here."""
    tokenizer = make_tokenizer()
    ids = np.asarray(tokenizer.convert_tokens_to_ids(list(text)), np.int32)
    assert Codec(tokenizer, stop_texts=("ab", "END")).read_samples([ids]) == [want]
