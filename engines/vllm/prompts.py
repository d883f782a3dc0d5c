"""Make prompts and sampling parameters for vLLM.

Images and videos are decoded, with one token for each in the prompt.
"""

from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from engines.batch.samples import Request, Sampling
from engines.config import VllmConfig
from engines.images.video import Video
from engines.models.spec import ModelSpec


def make_prompt(request: Request, model: ModelSpec) -> TokensPrompt:
    """Make vLLM's form of a request's prompt, with one token for each image, which vLLM expands.

    Raises:
        ValueError: an image cannot be read.
    """
    if not request.images:
        return TokensPrompt(prompt_token_ids=list(request.token_ids))
    from engines.images.decoding import decode
    from engines.images.placeholders import collapse_images

    ids = collapse_images(request.token_ids, request.images, model)
    decoded: dict[str, list] = {}
    digests: dict[str, list] = {}
    for image in request.images:
        kind, pixels = ("video", _decode_video(image)) if isinstance(image, Video) else ("image", decode(image))
        decoded.setdefault(kind, []).append(pixels)
        digests.setdefault(kind, []).append(image.digest)
    return TokensPrompt(prompt_token_ids=ids, multi_modal_data=decoded, multi_modal_uuids=digests)


def _decode_video(video: Video) -> tuple[np.ndarray, dict[str, Any]]:
    """Decode a video as vLLM takes it: its frames, and which of the whole video's they are."""
    from engines.images.frames import decode_video

    metadata = {
        "fps": video.fps,
        "duration": video.total / video.fps,
        "total_num_frames": video.total,
        "frames_indices": list(video.frames),
        "video_backend": "pillow",
        "do_sample_frames": False,
    }
    return decode_video(video), metadata


def make_params(sampling: Sampling, count: int, model: ModelSpec, config: VllmConfig) -> SamplingParams:
    """Make vLLM's parameters for ``count`` completions; greedy completions and scores ignore top_k, top_p and min_p."""
    greedy, kept = sampling.temperature == 0, dict[str, Any]()
    if config.top_k and not greedy and not sampling.scores_prompt:
        kept = {"top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p}
    if not sampling.scores_prompt:
        kept["min_tokens"] = min(config.min_new_tokens, sampling.max_tokens)
        kept["stop"] = list(config.stop) or None
    return SamplingParams(
        n=count,
        temperature=sampling.temperature,
        max_tokens=1 if sampling.scores_prompt else sampling.max_tokens,
        prompt_logprobs=0 if sampling.scores_prompt else None,
        # All ids that are kept: logprobs of the others are -inf.
        logprobs=None if greedy else max(sampling.top_logprobs, kept.get("top_k", 0)),
        flat_logprobs=not greedy,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # vLLM would stop at the end tokens of generation_config.json too
        detokenize=bool(kept.get("stop")),  # stop texts are looked for in the text
        logit_bias=dict.fromkeys(model.banned_tokens, float("-inf")) or None,
        **kept,
    )
