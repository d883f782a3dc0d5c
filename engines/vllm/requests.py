"""Prompts and settings as vLLM is given them, and completions as it answers."""

from typing import Any, cast

import numpy as np
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput

from engines.batch.samples import Completion, Prompt, Request, Sampling
from engines.images.decoding import decode
from engines.images.placeholders import collapse_images
from engines.images.video import Video
from engines.images.video_processor import decode_video
from engines.models.spec import ModelSpec


def make_params(asked: Request | Sampling, count: int, model: ModelSpec) -> SamplingParams:
    """Make vLLM's settings of ``count`` completions of a prompt."""
    greedy = asked.temperature == 0
    return SamplingParams(
        n=count,
        temperature=asked.temperature,
        max_tokens=asked.max_tokens,
        logprobs=None if greedy else asked.top_logprobs,
        flat_logprobs=not greedy,
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=True,  # vLLM would stop at the end tokens of generation_config.json too
        detokenize=False,
        logit_bias=dict.fromkeys(model.banned_tokens, float("-inf")) or None,
    )


def make_prompt(prompt: Prompt, model: ModelSpec) -> TokensPrompt:
    """Make vLLM's form of a prompt, with one token for each image: vLLM puts all of its tokens there.

    Raises:
        ValueError: an image or a video is gone, was changed, or cannot be decoded.
    """
    if not prompt.images:
        return TokensPrompt(prompt_token_ids=list(prompt.token_ids))
    ids = collapse_images(prompt.token_ids, prompt.images, model)
    decoded: dict[str, list] = {}
    digests: dict[str, list] = {}
    for image in prompt.images:
        kind, pixels = ("video", _decode_video(image)) if isinstance(image, Video) else ("image", decode(image))
        decoded.setdefault(kind, []).append(pixels)
        digests.setdefault(kind, []).append(image.digest)
    return TokensPrompt(prompt_token_ids=ids, multi_modal_data=decoded, multi_modal_uuids=digests)


def _decode_video(video: Video) -> tuple[np.ndarray, dict[str, Any]]:
    """Decode a video as vLLM takes it: its frames, and which of the whole video's they are."""
    metadata = {
        "fps": video.fps,
        "duration": video.total / video.fps,
        "total_num_frames": video.total,
        "frames_indices": list(video.frames),
        "video_backend": "pillow",
        "do_sample_frames": False,
    }
    return decode_video(video), metadata


def read_completion(sample: CompletionOutput) -> Completion:
    """Read a completion; RuntimeError where vLLM's versions or logprobs are not those of the sampled tokens."""
    tokens = np.asarray(sample.token_ids, dtype=np.int32)
    spans = tuple((int(span.version), span.end - span.start) for span in sample.weight_versions or ())
    if sum(length for _, length in spans) != len(tokens):
        raise RuntimeError(f"rollout: vLLM gave versions {spans} of {len(tokens)} sampled tokens, expected of each")
    finished, found = sample.finish_reason == "stop", cast(FlatLogprobs | None, sample.logprobs)
    if found is None:
        return Completion(tokens, np.zeros(0, np.float32), finished, spans)
    # At each position vLLM reports the sampled token, and then the likeliest ones, be it among them or not.
    ids = np.asarray(found.token_ids, dtype=np.int32).reshape(len(tokens), -1)
    logprobs = np.asarray(found.logprobs, dtype=np.float32).reshape(ids.shape)
    if not np.array_equal(ids[:, 0], tokens):
        raise RuntimeError("rollout: vLLM reported logprobs of other tokens than it sampled")
    if ids.shape[1] == 1:
        return Completion(tokens, logprobs[:, 0], finished, spans)
    # Banned tokens fill up what others leave.
    top_ids = np.where(logprobs > -np.inf, ids, -1)[:, 1:]
    return Completion(tokens, logprobs[:, 0].copy(), finished, spans, top_ids, logprobs[:, 1:])
