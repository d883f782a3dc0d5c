"""A mixture of experts as data that is read and checked without torch: its form, and the memory that it takes."""

from dataclasses import dataclass
from typing import Literal

from hardware.megatron.mixers import FP32, RoutedTokens

_INDEX = 8
"""Bytes of a number of a token or an expert."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of a layer's MLP.

    Attributes:
        count: experts of the layer. chosen: experts of each token. ffn: width of an expert.
        is_normed: the weights of a token's chosen experts are scaled to add up to 1.
        shared: width of an expert that every token goes through; 0 without one.
        gates_shared: the shared expert's output is scaled by a gate.
        score: function that makes an expert's weights of the router's logits.
        scale: factor of the weights of chosen experts.
        groups, open_groups: experts are in so many groups of equal size, and a token chooses among the experts of so
            many groups, those whose two best experts score highest together.
        has_bias: a bias of each expert, which no gradient moves, is added to its score for the choice alone.
    """

    count: int
    chosen: int
    ffn: int
    is_normed: bool
    shared: int = 0
    gates_shared: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    open_groups: int = 1
    has_bias: bool = False

    def count_kept(self, tokens: RoutedTokens, *, halves: int, has_z_loss: bool) -> float:
        """Count the bytes that a layer of experts keeps for each slot as if it held a token.

        Args:
            halves: tensors of its shared expert's width. has_z_loss: the squares of its logits are a loss.
        """
        kept = self.count_routed(tokens)
        if has_z_loss:  # logits, and the logarithm of their sum
            kept += (self.count + 1) * FP32
        # With the input, of which the router has a copy, and the gate and the output that it scales.
        gate = tokens.hidden + 1 if self.gates_shared else 0
        return kept + ((halves * self.shared + tokens.hidden + gate) * tokens.size if self.shared else 0)

    def count_routed(self, tokens: RoutedTokens) -> float:
        """Count the bytes that router and experts keep for the backward pass, for each slot as if it held a token.

        For each token: its hidden state in fp32 and its place; scores, and the chosen ones before and after they are
        scaled. For each of its experts: a row of the input; gate, up, activation, their product and that times the
        row's weight; the weight, its expert and two places. Of an expert in several parts each rank has a row.
        """
        row = (tokens.etp * tokens.hidden + 5 * self.ffn) * tokens.size + FP32 + 3 * _INDEX
        token = tokens.hidden * FP32 + (self.count + 2 * self.chosen) * FP32 + _INDEX
        return self.chosen * tokens.share * row + token

    def count_dispatched(self, tokens: RoutedTokens) -> float:
        """Count the bytes for each slot of the rows that are on their way from experts, beside what a mixture keeps.

        A row is the hidden state of a token and one of its experts. Without an exchange there are the experts' outputs,
        and the same in order of tokens. With one there are the rows that were sent, those that arrived, the experts'
        outputs, the same in order of ranks, and those that came back; of an expert in several parts all but the first
        once for each. Beside them each token has a hidden state in fp32, or two in 16 bits: its copy before and its sum
        after.
        """
        rows = 1 + (1 + 3 * tokens.share) * tokens.etp if tokens.ep * tokens.etp > 1 else 2
        return (rows * self.chosen * tokens.size + FP32) * tokens.hidden
