"""vLLM's CPU attention with the image rule: vLLM's own kernel, with other metadata.

The kernel takes a causal flag for each sequence. So a request is passed as several sequences that share their keys: the
text up to an image, causal, and the image, not causal, whose keys end with its last token. Queries of both then see the
same keys as in transformers' Gemma 3. For a token that is not causal the kernel applies a window on both sides, which
changes nothing while no image is longer than the window (``engines.models.families.images.gemma3``).
"""

import dataclasses
from collections.abc import Iterable

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from hardware.vllm_versions import CAUSAL_INTEGERS

_FLAG = torch.int32 if CAUSAL_INTEGERS.is_there else torch.bool
"""Type of the kernel's causal flags."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbouring tokens of a request that are passed to the kernel as one sequence.

    Attributes:
        request: number of the request.
        start, stop: positions of the tokens; their keys are all from 0 to ``stop``.
        causal: whether each token sees only itself and earlier tokens; else each sees the whole run.
    """

    request: int
    start: int
    stop: int
    causal: bool


def cut_runs(request: int, start: int, stop: int, images: Iterable[tuple[int, int]]) -> list[Run]:
    """Cut the scheduled positions ``start .. stop - 1`` of a request into runs of text and of images.

    Args:
        images: ``(first, last)`` position of each image, as vLLM gives them. The head of an image that began before
            ``start`` is in the cache, where it was computed with the whole image.

    Raises:
        RuntimeError: an image ends after ``stop``, so that its tokens would not see all of it.
    """
    if start == stop:
        return [Run(request, start, stop, causal=True)]  # the filler of a batch has no tokens
    runs, at = [], start
    for first, last in sorted(images):
        if last < at or first >= stop:
            continue
        if last >= stop:
            raise RuntimeError(
                f"rollout: the image at positions {first} to {last} of request {request} is cut by a forward pass of "
                f"positions {start} to {stop - 1}, and its tokens would not see all of it; expected prompts that are "
                "computed whole: leave enable_chunked_prefill out of --rollout.vllm"
            )
        if first > at:
            runs.append(Run(request, at, first, causal=True))
        at = last + 1
        runs.append(Run(request, max(first, start), at, causal=False))
    if at < stop:
        runs.append(Run(request, at, stop, causal=True))
    return runs


class ImageRuleBuilder(CPUAttentionMetadataBuilder):
    """Builds the kernel's metadata with one sequence for each run and not for each request."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        runs = list_runs(common)
        if all(run.causal for run in runs):
            return super().build(common_prefix_len, common, fast_build)
        return super().build(common_prefix_len, replace_requests(common, runs), fast_build)


def list_runs(common: CommonAttentionMetadata) -> list[Run]:
    """Return the runs of every request of a forward pass, in order."""
    images, starts = common.mm_req_doc_ranges or {}, common.query_start_loc.tolist()
    runs = []
    for request, stop in enumerate(common.seq_lens.tolist()):
        count = starts[request + 1] - starts[request]
        runs += cut_runs(request, stop - count, stop, images.get(request, ()))
    return runs


def replace_requests(common: CommonAttentionMetadata, runs: list[Run]) -> CommonAttentionMetadata:
    """Return metadata with each run as a sequence, with its request's blocks and keys up to its last token."""
    counts = torch.tensor([0, *(run.stop - run.start for run in runs)])
    starts = counts.cumsum(0).to(common.query_start_loc.dtype)  # [runs + 1]
    requests = torch.tensor([run.request for run in runs])
    return dataclasses.replace(
        common,
        num_reqs=len(runs),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([run.stop for run in runs], dtype=common.seq_lens.dtype),
        block_table_tensor=common.block_table_tensor[requests].contiguous(),
        max_query_len=int(counts.max()),
        causal=torch.tensor([run.causal for run in runs], dtype=_FLAG),
    )


class ImageRuleBackend(CPUAttentionBackend):
    """vLLM's CPU backend with ``ImageRuleBuilder``."""

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return ImageRuleBuilder


def install() -> None:
    """Make vLLM models that this process builds from now on compute attention with the image rule."""
    selector._cached_get_attn_backend.cache_clear()  # it would answer with the one of an engine before
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ImageRuleBackend.__name__}")
