"""Distillation: logprobs of the teacher of each prompt, and the loss by whole distributions. A reference is a teacher
of all prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.places import find_tokens
from engines.batch.shard import Outputs, TokenOutputs, change_columns, join_outputs, require_tokens
from rlworker.config.algorithm import DistillConfig
from rlworker.config.run import RunConfig
from rlworker.data.formats import SOURCE
from rlworker.data.rows import Row


def reverse_kl(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum KL(policy || teacher) of the distribution at each counting token (arXiv:2306.08543, section 2.1;
    arXiv:2306.13649, section 3).

    The classes of the distribution are the sampler's k likeliest ids, and all other ids together. Joining ids to a
    class can only lower the KL. With all ids of the vocabulary it is that of the whole distributions. The gradient is
    that of the distributions at the sampled places; the choice of the places has none.

    Raises:
        ValueError: the outputs or the batch lack the logprobs of the likeliest ids.
    """
    if (top := outputs.top_logprobs) is None:
        raise ValueError(
            "reverse_kl: the outputs have no logprobs of the sampler's likeliest ids; set --distill.top-k to their "
            "number"
        )
    divergence = (top.exp() * (top - batch.require_column("ref_top_logprobs"))).sum(-1)  # [N, k + 1] -> [N]
    metrics = {"entropy": outputs.entropy, "loss": divergence, "teacher_kl": divergence}
    total = (divergence * (batch.mask if batch.weights is None else batch.weights)).sum()
    return total, {name: (column * batch.mask).sum().detach() for name, column in metrics.items()}


def add_reference(
    batch: TrainBatch,
    rows: Sequence[Row],
    config: DistillConfig,
    forward: Mapping[str, Callable[[TrainBatch], Outputs]],
) -> TrainBatch:
    """Return the batch with ``ref_logprobs``, each sequence's by the teacher of its prompt or the reference.

    Where the models compute logprobs of the sampler's likeliest ids, the batch has ``ref_top_logprobs`` too.

    Args:
        rows: ``[P]``, the row of each prompt; ``batch.group`` numbers them.
        forward: role -> function that computes a model's outputs ``[n]`` for a batch of n tokens.
    """
    names = [config.name_role(row.source.get(SOURCE)) for row in rows]
    sequences: dict[str, list[int]] = {}  # role -> numbers of the sequences
    for number, prompt in enumerate(batch.require_column("group").tolist()):
        sequences.setdefault(names[prompt], []).append(number)
    found = [require_tokens(forward[role](batch.gather(np.asarray(part)))) for role, part in sequences.items()]
    # Joined, the parts have the batch's tokens in another order: [N], the place of each of its tokens among them.
    order = torch.from_numpy(np.argsort(find_tokens(batch.lengths, np.concatenate([*sequences.values()]))))
    outputs = change_columns(join_outputs(found), lambda _, column: column.index_select(0, order))
    return replace(batch, ref_logprobs=outputs.logprobs, ref_top_logprobs=outputs.top_logprobs)


def check_teachers(rows: Sequence[Row], run: RunConfig, roles: Mapping[str, object]) -> None:
    """Raise ValueError where the teachers of a run are of other sources than the rows.

    Args:
        rows: rows to learn from. roles: the run's models by their role.
    """
    config = run.distill
    sources = {str(row.source.get(SOURCE)) for row in rows}
    if missing := sorted(source for source in sources if config.name_role(source) not in roles):
        raise ValueError(
            f"distill: rows of {SOURCE} {', '.join(missing[:5])} have no teacher; name one by --distill.teachers "
            "SOURCE FOLDER, or one of all other rows by --algorithm.reference"
        )
    if idle := sorted(config.teachers.keys() - sources):
        raise ValueError(f"distill: teachers names {', '.join(idle[:5])}, and no row has this {SOURCE}; leave it out")
