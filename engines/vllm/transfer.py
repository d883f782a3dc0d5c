"""The weights of a training rank, as the senders of vLLM's weight transfer read them."""

from collections.abc import Callable, Iterator

from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

from engines.weight_digest import checksum


class ExportedWeights(WeightSource):
    """Weights that an engine exports, one at a time, with the checksum of each.

    Args:
        export: yields HF name and full tensor. It is a collective of the training ranks, so that all of them must go
            through it equally often.
        metadata: of an earlier update; None exports all weights once, when it is asked for.

    Attributes:
        checksums: HF name -> ``checksum`` of each tensor that was yielded.
    """

    def __init__(self, export: Callable[[], Iterator[tuple[str, Tensor]]], metadata: list[ParamMeta] | None = None):
        self._export, self._metadata = export, metadata
        self.checksums: dict[str, int] = {}
        self._weights: Iterator[tuple[str, Tensor]] | None = None

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of every weight that this rank yields."""
        if self._metadata is None:
            self._metadata = [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self._export()]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._weights = self._export()
        for name, tensor in self._weights:
            self.checksums[name] = checksum(tensor)
            yield name, tensor

    def drain(self) -> None:
        """Go through the rest of the weights, in which the other ranks are still to meet this one."""
        for _ in self._export() if self._weights is None else self._weights:
            pass
