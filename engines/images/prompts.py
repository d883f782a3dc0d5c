"""Make vLLM's form of a prompt with images or videos: they are decoded, with one token for each in the prompt."""

from typing import Any

import numpy as np

from engines.batch.samples import Request
from engines.images.decoding import decode
from engines.images.frames import decode_video
from engines.images.placeholders import collapse_images
from engines.images.video import Video
from engines.models.spec import ModelSpec


def make_prompt(request: Request, model: ModelSpec) -> dict[str, Any]:
    """Make a prompt of its ids, with one token for each image, and of the decoded images.

    Raises:
        ValueError: an image cannot be read.
    """
    ids = collapse_images(request.token_ids, request.images, model)
    decoded: dict[str, list] = {}
    digests: dict[str, list] = {}
    for image in request.images:
        kind, pixels = ("video", _decode_video(image)) if isinstance(image, Video) else ("image", decode(image))
        decoded.setdefault(kind, []).append(pixels)
        digests.setdefault(kind, []).append(image.digest)
    return {"prompt_token_ids": ids, "multi_modal_data": decoded, "multi_modal_uuids": digests}


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
