"""Memory of a platform's kernels, as its layers take it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelMemory:
    """Memory that a platform's kernels allocate and keep in addition to their inputs and outputs.

    Attributes:
        fuses_norms: whether a norm keeps only its input; an unfused norm keeps input and normalised input, both in
            fp32.
        fuses_swiglu: whether SwiGLU keeps only its input; an unfused one keeps both halves and the activation of the
            first.
        keeps_unrotated: whether rotation keeps its input.
        copies_output: whether core attention of a pack keeps its output and returns a copy of it.
        expands_kv: whether attention's backward makes gradients of keys and values for every query head, before it sums
            the query heads of a key head. In fp32 it then keeps keys and values of every query head, too.
        query_gradient_bytes: bytes per number of the buffer in which attention's backward sums the queries' gradient; 0
            without a buffer.
        slots_per_sequence: further slots of each sequence in that buffer.
        head_logits: logits that the output layer makes at once. Each chunk of tokens adds a gradient of the whole
            weight, which costs an accelerator more than the products of a small chunk. frozen_logits: the same where
            the weight is frozen: small chunks then add nothing but their calls.
    """

    fuses_norms: bool = False
    fuses_swiglu: bool = False
    keeps_unrotated: bool = False
    copies_output: bool = False
    expands_kv: bool = False
    query_gradient_bytes: int = 0
    slots_per_sequence: int = 0
    head_logits: int = 2**25
    frozen_logits: int = 2**22

    def count_norm_input_bytes(self, itemsize: int) -> int:
        """Count the bytes that a norm keeps for each number of its input.

        Args:
            itemsize: bytes of a number.
        """
        return itemsize if self.fuses_norms else 8

    def keeps_own_input(self, itemsize: int) -> bool:
        """Tell whether a norm keeps its input tensor itself, so that no second copy of it is counted."""
        return self.fuses_norms or itemsize == 4

    def count_backward_bytes(
        self, queries: float, keys: float, sequences: float, heads: int, kv_heads: int, head_dim: int, itemsize: int
    ) -> float:
        """Count the bytes that attention's backward allocates in one layer.

        Args:
            queries, keys: number of slots. sequences: number of sequences.
            heads, kv_heads: number of heads on this rank. itemsize: bytes of a number.
        """
        expanded = 2 * keys * heads * itemsize if self.expands_kv and heads != kv_heads else 0
        apart = (queries + self.slots_per_sequence * sequences) * heads * self.query_gradient_bytes
        return (expanded + apart) * head_dim
