"""Every rule at every parallel size: probed for leaks and missing links, and compared with HuggingFace under the rule's
own mask, which is drawn here one pair at a time."""

import dataclasses
import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
from support.cover import matrix
from support.factors import LAYOUTS, PLATFORMS, SIZES, parse_size
from support.huggingface import name_gradients, run_forward
from support.ranks.engines_cases import build_engine, gather_logits, make_batch, plan
from support.ranks.pool import Ranks, draw_address
from support.rounding import Distance, Draw, Rounding, check_distances, measure_rounding

from engines.batch.batch import TrainBatch
from engines.models.spec import ModelSpec
from engines.probes.case import ProbeCase
from hardware.attention.capabilities import find_backend
from hardware.attention.rules import CAUSAL, Rule
from hardware.platforms import get_platform
from rlworker.checks.reference.huggingface import load_huggingface, probe_loss

MASK_SIZES = tuple(size for size in (*SIZES, "CP4") if "DP" not in size)
"""Replicas of data parallelism have whole sequences each: a mask is the same in all."""
RULES = {"causal": CAUSAL, "window": Rule(window=4), "images": Rule(images=True)}
PROBED = ProbeCase(
    lengths=(9, 1, 14, 0, 6),
    columns=tuple(range(30)),
    image_block=(-1, 0, 0, -1, -1, 1, 1, 1, -1, -1, *[-1] * 4, *[0] * 4, *[1] * 3, *[-1] * 3, *[-1] * 6),
    prefixes=(3, 1, 5, 0, 2),
)


def images_of(length: int) -> list[int]:
    """Two images side by side in sequences that have the room, -1 elsewhere."""
    block = [-1] * length
    if length > 6:
        block[2:6] = [0, 0, 1, 1]
    return block


def batch_with_images():
    batch = make_batch()
    blocks = [number for length in batch.lengths for number in images_of(length)]
    return dataclasses.replace(batch, image_block=torch.tensor(blocks))


def may_see(rule: Rule, images: list[int], query: int, key: int) -> bool:
    """The rules in words, for one pair of a sequence."""
    same_image = rule.images and images[query] >= 0 and images[query] == images[key]
    return (key <= query or same_image) and (rule.window is None or query - key < rule.window)


@pytest.fixture(scope="module")
def reference(make_hf_model):
    folder = make_hf_model("qwen2", True)
    return {name: measure_rounding(compute_under_rule, folder, name) for name in RULES}


def compute_under_rule(draw: Draw, folder: str, name: str) -> dict:
    """Compute logits and gradients under a rule's own mask."""
    batch, spec = batch_with_images(), ModelSpec.from_folder(folder)
    with draw.computing():
        model = draw.load(partial(load_huggingface, spec))
        run = run_forward(model, spec, batch, probe_loss, arguments=partial(mask_argument, RULES[name]))
        (run.loss / batch.mask.sum()).backward()
        return {"logits": run.logits, "gradients": name_gradients(model, spec)}


def mask_argument(rule: Rule, one: TrainBatch) -> dict[str, torch.Tensor]:
    """What transformers adds to the scores of a sequence ``[1, 1, n, n]``, drawn one pair at a time."""
    images, places = one.image_block.tolist(), range(one.num_tokens)
    see = torch.tensor([[may_see(rule, images, query, key) for key in places] for query in places])
    return {"attention_mask": torch.zeros(see.shape).masked_fill(~see, torch.finfo(torch.float32).min)[None, None]}


def is_honoured(platform: str, layout: str, rule: str) -> bool:
    """The NPU has no call for a pack with images; all else runs everywhere, at every size."""
    return (platform, layout, rule) != ("npu-emulated", "thd", "images")


def set_rule(engine, rule: Rule) -> None:
    """Set the attention rule of every layer."""
    kinds = tuple(dataclasses.replace(kind, rule=rule) for kind in engine.model.kinds)
    engine.model = dataclasses.replace(engine.model, kinds=kinds)


def run_rules(rank, world, address, folder, settings, platform, places, probed):
    """For each layout and rule of ``places``: what the probes found on this rank, and the leader's logits and
    gradients. Where not ``probed``, the logits alone."""
    engine = build_engine(rank, world, address, folder, settings, platform)
    from engines.probes.megatron import probe_attention, probe_tokens, read_gradients, take_gradients

    batch, results = batch_with_images(), {}
    for kind, name in places:
        rule, leaks, gradients = RULES[name], [], None
        set_rule(engine, rule)
        engine.config = dataclasses.replace(engine.config, layout=kind)
        if probed:
            leaks = [*probe_attention(engine, kind, rule, PROBED), *probe_tokens(engine, kind, (rule,), PROBED)]
            take_gradients(engine, kind, batch, probe_loss, float(batch.mask.sum()))
            gradients = read_gradients(engine, engine.model.list_hf_names())
        schedule, shard = plan(engine, batch)
        logits = gather_logits(engine, shard)
        results[kind, name] = leaks, None if logits is None else schedule.restore_order(logits), gradients
    return results


@pytest.fixture
def check_rules(make_hf_model, reference, measured):
    """``check_rules(pool, settings, platform, places, label)``: a platform against HuggingFace, and against the CPU
    where it is another, in each layout and rule of ``places``."""

    def run(pool, settings: dict, platform: str, places: list[tuple[str, str]], label: str) -> None:
        case = draw_address(), make_hf_model("qwen2", True), settings
        ranks = pool.run(run_rules, *case, platform, places, True)
        on_cpu = ranks if platform == "cpu" else pool.run(run_rules, *case, "cpu", places, False)
        for place in places:
            distances = compare([rank[place] for rank in ranks], [rank[place] for rank in on_cpu], reference[place[1]])
            check_distances(distances, measured, f"{label} {platform} {place}")

    return run


def compare(results: list[tuple], on_cpu: list[tuple], want: Rounding) -> dict[str, Distance]:
    """Compare the ranks' results, in which no probe may have found anything, with HuggingFace's and the CPU's."""
    assert [leaks for leaks, *_ in results] == [[]] * len(results)
    _, logits, gradients = next(result for result in results if result[1] is not None)
    cpu_logits = next(result[1] for result in on_cpu if result[1] is not None)
    return {
        "logits": want.compare("logits", logits),
        "gradients": want.compare("gradients", gradients),
        "logits from cpu": want.compare("logits", logits, base=cpu_logits),
    }


@matrix(
    {"size": MASK_SIZES, "platform": PLATFORMS, "layout": LAYOUTS, "rule": tuple(RULES)},
    allowed=lambda case: is_honoured(case["platform"], case["layout"], case["rule"]),
    # Stages have whole layers, so that the calls of a platform are those of the size without them.
    heavy=lambda case: case["size"] in ("TP2-PP2", "PP2-CP2"),
)
def test_rules_at_every_size(pool_of, check_rules, size, platform, layout, rule):
    check_rules(pool_of(size), parse_size(size), platform, [(layout, rule)], size)


@pytest.mark.product
@pytest.mark.parametrize("platform", PLATFORMS)
def test_rules_on_eight_ranks(check_rules, platform):
    pool = Ranks(8)
    try:
        places = [place for place in itertools.product(LAYOUTS, RULES) if is_honoured(platform, *place)]
        check_rules(pool, {"tp": 2, "cp": 2, "pp": 2}, platform, places, "TP2-CP2-PP2")
    finally:
        pool.close()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_platform_refuses_the_rest(platform):
    """So no case is left out above that there could be."""
    backends = get_platform(platform).attention_backends
    for cp, layout, rule in itertools.product((1, 2, 4), LAYOUTS, RULES):
        if is_honoured(platform, layout, rule):
            find_backend(backends, layout, cp, RULES[rule])
        else:
            with pytest.raises(ValueError, match="no backend honours the rule"):
                find_backend(backends, layout, cp, RULES[rule])


def test_the_reference_masks_differ(reference):
    """A rule that changed nothing would prove nothing."""
    logits = [reference[name].truth["logits"][""] for name in RULES]
    assert all(float((a - b).abs().max()) > 0.1 for i, a in enumerate(logits) for b in logits[:i])


@pytest.mark.parametrize("logits", [2**26, 2**13], ids=["the head for all", "the head for some"])
def test_the_probe_hears_a_wrong_rule(one_rank, make_hf_model, logits):
    """The same probe, told another rule than the engine runs: what it is for. Of a large vocabulary the head scores
    some of the tokens, as many as are said."""

    def call(rank, world, address, folder, logits):
        engine = build_engine(rank, world, address, folder, {})

        from engines.megatron import engine as engine_module
        from engines.probes import head
        from engines.probes import megatron as probes

        set_rule(engine, Rule(window=2))
        scored, score = [], engine_module.score_tokens

        def count(hidden, *args, **settings):
            scored.append(len(hidden))
            return score(hidden, *args, **settings)

        with patch.object(head, "_PASS_LOGITS", logits), patch.object(engine_module, "score_tokens", count):
            found = [probes.probe_tokens(engine, kind, (CAUSAL,), PROBED) for kind in ("bshd", "thd")]
        return found, max(scored) * engine.model.vocab

    found, most = one_rank.run(call, draw_address(), make_hf_model("qwen2", True), logits)[0]
    assert most <= logits
    for (influence,) in found:
        # Four layers of two tokens reach back four places; the sequence of 14 has 45 pairs further apart, that of nine
        # 10 and that of six 1.
        assert influence.missing == sum(max(0, n - 5) * (n - 4) // 2 for n in PROBED.lengths)
        assert not influence.leaks and "does not see its own token" in influence.example
