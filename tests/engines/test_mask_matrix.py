"""Every rule at every parallel size: probed for leaks and missing links, and compared with HuggingFace under the rule's
own mask, which is drawn here one pair at a time."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from engines_cases import build_engine, logits_of, make_batch, plan, weighted_loss
from ranks import Ranks, free_address
from transformers import AutoModelForCausalLM

from engines.probe_case import ProbeCase
from hardware.capabilities import find_backend
from hardware.rules import CAUSAL, Rule

RULES = {"causal": CAUSAL, "window": Rule(window=4), "images": Rule(images=True)}
SIZES = {
    "one": {},
    "TP2": {"tp": 2},
    "CP2": {"cp": 2},
    "PP2": {"pp": 2},
    "TP2-CP2": {"tp": 2, "cp": 2},
    "TP2-PP2": {"tp": 2, "pp": 2},
    "CP2-PP2": {"cp": 2, "pp": 2},
    "CP4": {"cp": 4},
}
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
    """Rule -> logits and gradients of HuggingFace, a sequence at a time, with the rule's mask given to it."""
    batch = batch_with_images()
    found = {}
    for name, rule in RULES.items():
        model = AutoModelForCausalLM.from_pretrained(make_hf_model("qwen2", True), attn_implementation="eager")
        logits, loss = [], torch.zeros(())
        for i, length in enumerate(batch.lengths):
            if not length:
                continue
            one = batch.select(i, i + 1)
            images = images_of(length)
            see = torch.tensor([[may_see(rule, images, q, k) for k in range(length)] for q in range(length)])
            mask = torch.zeros(1, 1, length, length).masked_fill(~see, torch.finfo(torch.float32).min)
            logits.append(model(one.inputs[None], attention_mask=mask).logits[0])
            log_p = logits[-1].log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            chosen = log_p.gather(-1, one.targets[:, None])[:, 0]
            loss = loss - ((one.advantages * chosen + 0.1 * entropy) * one.mask).sum()
        (loss / batch.mask.sum()).backward()
        found[name] = torch.cat(logits).detach(), {n: p.grad.clone() for n, p in model.named_parameters()}
    return found


PLATFORMS = {"cpu": set(), "npu-emulated": {("thd", "images")}}
"""Platform -> layouts and rules that it refuses."""


def run_rules(rank, world, address, folder, settings, platform):
    """For each layout and rule that a platform honours: what the probes found on this rank, and the leader's logits and
    gradients."""
    engine = build_engine(rank, world, address, folder, settings, platform)
    from engines.megatron.probe import gradients_of, probe_attention, probe_tokens

    batch, results = batch_with_images(), {}
    for kind in ("bshd", "thd"):
        for name, rule in RULES.items():
            try:
                find_backend(engine.platform.attention_backends, kind, settings.get("cp", 1), rule)
            except ValueError:
                continue
            engine.model = dataclasses.replace(engine.model, rules=(rule,))
            engine.config = dataclasses.replace(engine.config, layout=kind)
            leaks = [*probe_attention(engine, kind, rule, PROBED), *probe_tokens(engine, kind, (rule,), PROBED)]
            gradients = gradients_of(engine, kind, batch, weighted_loss, float(batch.mask.sum()))
            schedule, shard = plan(engine, batch)
            logits = logits_of(engine, shard)
            results[kind, name] = leaks, None if logits is None else schedule.in_order(logits), gradients
    return results


def check_sizes(pool, folder, settings, reference, capsys, label, platforms=tuple(PLATFORMS)):
    """Each platform against HuggingFace, and the others against the first."""
    first = {}
    for platform, refused in ((name, PLATFORMS[name]) for name in platforms):
        ranks = pool.run(run_rules, free_address(), folder, settings, platform)
        assert set(ranks[0]) == set(itertools.product(("bshd", "thd"), RULES)) - refused
        worst = {"logits": 0.0, "gradients": 0.0, "logits from cpu": 0.0}
        for kind, name in ranks[0]:
            results = [rank[kind, name] for rank in ranks]
            assert [leaks for leaks, *_ in results] == [[]] * len(ranks), (label, platform, kind, name)
            want_logits, want_gradients = reference[name]
            _, logits, gradients = next(result for result in results if result[1] is not None)
            found = {
                "logits": float((logits - want_logits).abs().max()),
                "gradients": max(float((gradients[n] - g).abs().max()) for n, g in want_gradients.items()),
                "logits from cpu": float((logits - first.setdefault((kind, name), logits)).abs().max()),
            }
            worst = {key: max(worst[key], found[key]) for key in worst}
            assert max(found["logits"], found["logits from cpu"]) <= 1e-5, (label, platform, kind, name, found)
            assert found["gradients"] <= 1e-6, (label, platform, kind, name, found)
        with capsys.disabled():
            numbers = "  ".join(f"{name} {value:.1e}" for name, value in worst.items())
            print(f"\n{label}, {platform}: probes silent, {numbers}", end="")


def sizes_and_platforms() -> list:
    """Every run has the CPU at every size, and the emulated NPU beside it on one rank and two; ``-m large`` on four."""
    cases = []
    for name, settings in SIZES.items():
        if np.prod(list(settings.values()), initial=1) < 4:
            cases.append(pytest.param(name, tuple(PLATFORMS), id=name))
        else:
            cases.append(pytest.param(name, ("cpu",), id=f"{name}-cpu"))
            cases.append(pytest.param(name, tuple(PLATFORMS), id=name, marks=pytest.mark.large))
    return cases


@pytest.mark.parametrize(("sizes", "platforms"), sizes_and_platforms())
def test_rules_at_every_size(request, make_hf_model, reference, capsys, sizes, platforms):
    settings = SIZES[sizes]
    world = int(np.prod(list(settings.values()), initial=1))
    pool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[world])
    check_sizes(pool, make_hf_model("qwen2", True), settings, reference, capsys, sizes, platforms)


@pytest.mark.large
def test_rules_on_eight_ranks(make_hf_model, reference, capsys):
    pool = Ranks(8)
    try:
        settings = {"tp": 2, "cp": 2, "pp": 2}
        check_sizes(pool, make_hf_model("qwen2", True), settings, reference, capsys, "TP2-CP2-PP2")
    finally:
        pool.close()


def test_the_reference_masks_differ(reference):
    """A rule that changed nothing would prove nothing."""
    logits = [reference[name][0] for name in RULES]
    assert all(float((a - b).abs().max()) > 0.1 for i, a in enumerate(logits) for b in logits[:i])


def test_the_probe_hears_a_wrong_rule(one_rank, make_hf_model):
    """The same probe, told another rule than the engine runs: what it is for."""

    def call(rank, world, address, folder):
        engine = build_engine(rank, world, address, folder, {})
        from engines.megatron.probe import probe_tokens

        engine.model = dataclasses.replace(engine.model, rules=(Rule(window=2),))
        return [probe_tokens(engine, kind, (CAUSAL,), PROBED) for kind in ("bshd", "thd")]

    for (influence,) in one_rank.run(call, free_address(), make_hf_model("qwen2", True))[0]:
        # Four layers of two tokens reach back four places; the sequence of 14 has 45 pairs further apart, that of nine
        # 10 and that of six 1.
        assert influence.missing == sum(max(0, n - 5) * (n - 4) // 2 for n in PROBED.lengths)
        assert not influence.leaks and "does not see its own token" in influence.example
