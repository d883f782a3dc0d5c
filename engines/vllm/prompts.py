"""Prompts as vLLM takes them: their images and videos decoded, and one token in the place of each."""

from typing import Any

import numpy as np
from vllm.inputs import TokensPrompt

from engines.batch.samples import Prompt
from engines.images.video import Video
from engines.models.spec import ModelSpec


def make_prompt(prompt: Prompt, model: ModelSpec) -> TokensPrompt:
    """Make vLLM's form of a prompt, with one token for each image: vLLM puts all of its tokens there.

    Raises:
        ValueError: an image cannot be read.
    """
    if not prompt.images:
        return TokensPrompt(prompt_token_ids=list(prompt.token_ids))
    from engines.images.decoding import decode
    from engines.images.placeholders import collapse_images

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
