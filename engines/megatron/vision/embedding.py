"""Images into a Megatron decoder: the tower of transformers on the first pipeline stage, merged by index.

Each image token knows the row of the tower's output that stands for it, and rows reach their slots through the
``Layout`` like any column. So packs, context and sequence parallelism need no padded detour, and attention is told
nothing about images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import cast

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from engines.batch.balance import split_by_budget
from engines.batch.batch import TrainBatch
from engines.batch.samples import Image
from engines.images.plan import VisionPlan
from engines.images.processor import ImageProcessor
from engines.megatron.extensions.extension import Extension, ForwardPass, Stage
from engines.megatron.groups import get_cut_group
from engines.megatron.layout import Layout
from engines.megatron.vision.towers import TowerRunner
from engines.models.vision.vision_spec import VisionSpec
from hardware.attention.inputs import AttentionInputs
from hardware.collectives import gather_ranks
from hardware.megatron.marks import mark_sequence_parallel
from hardware.transfer import to_device


def find_runner(vision: VisionSpec) -> TowerRunner:
    """Find the code that runs a tower."""
    return resolve_name(vision.tower.runner)


def add_tower(module: GPTModel, vision: VisionSpec) -> None:
    """Add the tower ``module.vision``, replicated on every rank, and add its features to the first layers."""
    runner = find_runner(vision)
    module.vision = runner.build(vision, module.config.params_dtype)
    if module.config.recompute_granularity == "full":
        for block in runner.list_blocks(module.vision):  # none of which draws random numbers
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    # Each rank has its own images: Megatron sums the gradients of weights marked so over tensor-parallel ranks.
    mark_sequence_parallel(module.vision.parameters(), module.config)
    for level in range(vision.deepstack):
        module.decoder.layers[level].register_forward_hook(partial(_add_level, level), with_kwargs=True)


@dataclass(frozen=True)
class Deepstack:
    """Features that the first layers add to their output.

    Attributes:
        features: ``[rows, levels - 1, h]``, a leaf: layers that are recomputed for their backward pass add to its
            gradient without going back through the tower each.
        slots, rows: ``[n]`` long, this rank's slots ``[s / tp, b]``, flattened, that hold image tokens, and their rows.
    """

    features: Tensor
    slots: Tensor
    rows: Tensor


def _add_level(level: int, layer, args: tuple, kwargs: dict, output: tuple) -> tuple | None:
    """Add a level of features to a layer's output ``[s / tp, b, h]``, as a forward hook of that layer."""
    deepstack = kwargs["packed_seq_params"].deepstack
    if deepstack is None:
        return None
    hidden, *rest = output
    added = deepstack.features[:, level].index_select(0, deepstack.rows)  # [rows, h] -> [n, h]
    # Slots number [s / tp * b], as `flatten` gives them; those of text are left as they are.
    return hidden.flatten(0, 1).index_add(0, deepstack.slots, added).view_as(hidden), *rest


class _HandBack(torch.autograd.Function):
    """Identity of ``x`` whose backward gives ``source`` the gradient that its copy ``leaf`` has collected.

    Every use of the leaf comes after ``x``, so its backward is done when the backward of ``x`` begins. The leaf is
    passed within a list: as an input its gradient would wait for this node.
    """

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, leaf: list[Tensor]):
        (ctx.leaf,) = leaf
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, ctx.leaf.grad, None


class Vision(Extension):
    """The tower's side of the first pipeline stage: images in, features in the place of image tokens out.

    Attributes:
        budget: bytes that images may take at once while they are decoded.

    Args:
        stage: the decoder with its tower.
    """

    def __init__(self, stage: Stage):
        model, module = stage.model, stage.module
        self.budget = stage.config.image_memory_mb * 2**20
        self.spec, self.module, self.device = model.require_vision(), module, stage.device
        self.processor = ImageProcessor(model.folder, self.spec)
        self.tower = cast(torch.nn.Module, module.vision)
        self.runner = find_runner(self.spec)
        self.has_experts = model.experts is not None

    @cached_property
    def learns(self) -> bool:
        """True where some of the tower has a gradient, as the settings say before the first pass."""
        return any(parameter.requires_grad for parameter in self.tower.parameters())

    def prepare(self, forward: ForwardPass) -> ForwardPass:
        """Embed the ids, with features in the place of image tokens."""
        embedded, inputs = self.embed(forward.ids, forward.micro, forward.layout, forward.inputs)
        return replace(forward, embedded=embedded, inputs=inputs)

    def embed(
        self, ids: Tensor, micro: TrainBatch, layout: Layout, inputs: AttentionInputs
    ) -> tuple[Tensor, AttentionInputs]:
        """Embed ids ``[b, s]`` as ``[s / tp, b, h]``, with features in the place of image tokens. Collective over the
        tensor- and context-parallel ranks, which each run the tower on a part of the images.

        Raises:
            ValueError: an image cannot be read.
        """
        embedded = self.module.embedding(ids, None)
        group = cast(ProcessGroup, mpu.get_tensor_and_context_parallel_group())
        plan = VisionPlan.build(micro, self.spec.merge, group.size())
        if not plan.height:  # every rank knows it
            if self.has_experts and self.learns and torch.is_grad_enabled() and not embedded.requires_grad:
                embedded.requires_grad_()  # other replicas have images, and share the exchanges of the backward pass
            return embedded, inputs
        # [ranks, height, levels, h] -> [ranks * height, levels, h], which is how the plan numbers rows.
        features = gather_ranks(self._features(plan, group.rank()), group).flatten(0, 1)
        slots, rows = self._places(to_device(plan.rows, self.device), layout)
        # By index, not by mask: an image token's slot [s / tp * b] takes level 0 of its row, wherever both lie.
        merged = embedded.flatten(0, 1).index_copy(0, slots, features[:, 0].index_select(0, rows)).view_as(embedded)
        if not self.spec.deepstack:
            return merged, inputs
        deeper = features[:, 1:]  # [rows, levels - 1, h], for the first layers
        leaf = deeper.detach().requires_grad_(deeper.requires_grad)
        if leaf.requires_grad:
            merged = _HandBack.apply(merged, deeper, [leaf])
        return merged, replace(inputs, deepstack=Deepstack(leaf, slots, rows))

    def _features(self, plan: VisionPlan, rank: int) -> Tensor:
        """Compute features ``[height, levels, h]`` of this rank's images, zero past them."""
        learns, images = self.learns and torch.is_grad_enabled(), plan.images[rank]
        dtype = self.module.config.params_dtype
        blank = torch.zeros(plan.height, self.spec.levels, self.spec.out, dtype=dtype, device=self.device)
        if not images:  # it takes part in the gather all the same, and in its backward
            return blank.requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            features = torch.cat(
                [self.see(images[wave]) for wave in split_by_budget([i.nbytes(self.spec) for i in images], self.budget)]
            )
        return torch.cat([features, blank[len(features) :]])

    def see(self, images: Sequence[Image]) -> Tensor:
        """Compute features of images in one pass of the tower: ``[rows, levels, h]``, level 0 being the last."""
        pixels = self.processor.patches(images)
        grid = to_device(torch.tensor([image.grid for image in images]), self.device)
        pixels = to_device(pixels.to(self.module.config.params_dtype), self.device)
        return self.runner.see(self.tower, pixels, grid)

    def _places(self, rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Find the slots ``[n]`` of this rank's part of the embeddings that hold image tokens, and the row of each."""
        local = layout.pack(rows, fill=-1).transpose(0, 1)  # rows [N] take the way of the ids: [b, s] -> [s, b]
        if self.module.config.sequence_parallel:  # the embedding has cut along s, into runs of s / tp
            group = get_cut_group("tp")
            local = local.chunk(group.size())[group.rank()]
        local = local.flatten()  # [s / tp * b]; text and padding are -1
        slots = (local >= 0).nonzero()[:, 0]
        return slots, local[slots]
