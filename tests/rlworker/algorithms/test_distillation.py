"""Distillation against sums over whole vocabularies, and teachers by the source of the row."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs
from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from engines.models.spec import ModelSpec
from rlworker.algorithms.distillation import add_reference, check_teachers, reverse_kl
from rlworker.algorithms.objective import make_objective
from rlworker.config.algorithm import AlgorithmConfig, DistillConfig
from rlworker.config.beside_actor import check_same_tokens
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig
from rlworker.data.rows import Row
from rlworker.tracking.log import read_metrics

N, VOCAB = 6, 24
DISTILL = AlgorithmConfig(name="distill", reference="TEACHER")


def join_classes(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities ``[N, k + 1]`` of k ids, and of all other ids together, one place and class at a time."""
    rows = []
    for row, chosen in zip(log_p, ids.tolist(), strict=True):
        others = [row[v].exp() for v in range(len(row)) if v not in chosen]
        # As the head has it where there are no others.
        rest = torch.stack(others).sum().log() if others else torch.tensor(1e-30, dtype=row.dtype).log()
        rows.append(torch.stack([*(row[v] for v in chosen), rest]))
    return torch.stack(rows)


@pytest.mark.parametrize("top", [1, 4, VOCAB])
def test_the_loss_is_the_kl_and_its_gradient(top):
    generator = torch.Generator().manual_seed(top)
    logits, teacher = (3 * torch.randn(N, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    ours, theirs = logits.log_softmax(-1), teacher.log_softmax(-1)
    ids = ours.detach().topk(top, -1).indices
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False, True, True])
    tokens = torch.zeros(N, dtype=torch.long)
    batch = TrainBatch((N,), tokens, tokens, tokens, mask, ref_top_logprobs=join_classes(theirs, ids))
    outputs = TokenOutputs(ours[:, 0], torch.zeros(N), join_classes(ours, ids))
    loss, metrics = reverse_kl(outputs, replace(batch, weights=weights))
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)

    p, t = join_classes(ours, ids).exp(), join_classes(theirs, ids).exp()
    by_class = [sum(a * (a / b).log() for a, b in zip(*pair, strict=True)) for pair in zip(p, t, strict=True)]
    (expected,) = torch.autograd.grad(sum(w * kl for w, kl in zip(weights, by_class, strict=True)), logits)
    assert float((gradient - expected).abs().max()) <= 1e-12
    dense = (ours.exp() * (ours - theirs)).sum(-1).detach()
    assert float(metrics["teacher_kl"]) == pytest.approx(float(sum(kl for kl, m in zip(by_class, mask) if m)))
    assert all(0 <= float(kl) <= float(most) + 1e-12 for kl, most in zip(by_class, dense, strict=True))
    if top == VOCAB:
        assert float(loss) == pytest.approx(float((weights * dense).sum()), rel=1e-12)


def test_each_sequence_is_compared_with_the_teacher_of_its_row():
    lengths, generator = (3, 2, 4, 1), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    top = torch.stack([tokens, (tokens + 1) % VOCAB], 1).int()
    columns = dict(group=torch.tensor([0, 1, 1, 2]), rollout_top_ids=top)
    batch = TrainBatch(lengths, tokens, tokens, tokens, torch.ones(sum(lengths), dtype=torch.bool), **columns)
    asked = {}

    def make(role: str, scale: float):
        def forward(part: TrainBatch) -> TokenOutputs:
            asked[role] = part.lengths
            logprobs = scale * part.inputs.float()
            assert part.rollout_top_ids is not None
            return TokenOutputs(logprobs, logprobs, scale * part.rollout_top_ids[:, [0, 1, 1]].float())

        return forward

    rows = [Row("", (1,), "", {"data_source": source} if source else {}) for source in ("sums", "", "sums")]
    config = DistillConfig({"sums": "A", "code": "B"})
    forward = {"reference": make("reference", 1.0), "teacher sums": make("teacher sums", -1.0)}
    found = add_reference(batch, rows, config, forward)
    assert asked == {"teacher sums": (3, 1), "reference": (2, 4)}
    sign = torch.tensor([-1.0] * 3 + [1.0] * 6 + [-1.0])
    assert found.ref_logprobs is not None and found.ref_top_logprobs is not None
    assert torch.equal(found.ref_logprobs, sign * tokens)
    assert torch.equal(found.ref_top_logprobs[:, 1], sign * ((tokens + 1) % VOCAB))

    assert DistillConfig().name_role(["any"]) == config.name_role({}) == "reference", "a source may be any JSON value"

    roles = {"actor": None, "teacher sums": None, "teacher code": None}
    run = RunConfig(algorithm=AlgorithmConfig(name="distill"), distill=config)
    with pytest.raises(ValueError, match=r"rows of data_source None have no teacher; name one by --distill\.teachers"):
        check_teachers(rows, run, roles)
    with pytest.raises(ValueError, match="teachers names code, and no row has this data_source"):
        check_teachers(rows, replace(run, algorithm=DISTILL), roles | {"reference": None})


def test_settings_that_distillation_excludes_are_refused():
    assert make_objective(RunConfig(algorithm=DISTILL, distill=DistillConfig(top_k=4))).loss is reverse_kl
    assert make_objective(RunConfig(algorithm=DISTILL)).loss is not reverse_kl
    without = replace(DISTILL, kl_coef=0.0)  # as a command line turns off a recipe's
    assert make_objective(RunConfig(algorithm=without, distill=DistillConfig(top_k=4))).loss is reverse_kl
    several = DistillConfig({"sums": "A"}, 4)
    models = RunConfig(model="M", algorithm=AlgorithmConfig(name="distill"), distill=several).roles
    assert models == {"actor": "M", "teacher sums": "A"}
    for settings, message in (
        (dict(distill=DistillConfig(top_k=4)), r"top_k=4 are of distillation, .* set --algorithm\.name distill"),
        (dict(algorithm=AlgorithmConfig(name="distill")), "distill has no teacher; set --algorithm.reference"),
        (dict(algorithm=replace(DISTILL, kl_coef=0.1), distill=several), r"kl_coef=0\.1 penalizes the distance from"),
        (dict(algorithm=DISTILL, distill=several, rollout=VllmConfig(top_k=20)), "compares whole distributions"),
        (dict(algorithm=replace(DISTILL, entropy_coef=0.1), distill=several), r"entropy_coef is 0\.1, and .* no param"),
    ):
        with pytest.raises(ValueError, match=message):
            make_objective(RunConfig(**settings))


def test_a_teacher_of_another_vocabulary_is_refused(make_hf_model, tmp_path):
    """The ids of two tokenizers may both be in range and mean other texts."""
    spec = ModelSpec.from_folder(make_hf_model("qwen2", True))
    for name, words in (("ours", "abc"), ("theirs", "abd"), ("same", "abc")):
        vocab = {letter: number for number, letter in enumerate(words)}
        parts = {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}, "added_tokens": []}
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"version": "1.0", **parts}))
    ours, theirs, same, none = (replace(spec, folder=str(tmp_path / name)) for name in ("ours", "theirs", "same", "x"))
    check_same_tokens(same, ours)
    check_same_tokens(none, ours)
    message = "1 of 3 tokens differ, the first is 'c', id 2 of the actor and no token there; take a model with the"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_same_tokens(theirs, ours)


@pytest.mark.large
@pytest.mark.usefixtures("cluster", "by_value")
def test_a_run_with_two_teachers_learns_by_their_own_kl(make_hf_model, tmp_path, measured):
    """Over tensor-parallel halves of the vocabulary, against transformers' whole distributions of each teacher."""
    from support.huggingface import load_folder

    from recipes.common.addition import make_data, make_tokenizer
    from rlworker.algorithms.advantages import distill
    from rlworker.environments.reward import exact_match
    from rlworker.trainers.rl import Trainer

    rows = (make_data(tmp_path) / "train.jsonl").read_text().splitlines()[:16]
    sources = ["sums", "others"] * 8
    path = tmp_path / "rows.jsonl"
    named = (json.dumps(json.loads(row) | {"data_source": source}) for row, source in zip(rows, sources, strict=True))
    path.write_text("\n".join(named))
    student, teachers = make_hf_model("llama", False), {"sums": make_hf_model("qwen2", False)}
    reference = make_hf_model("llama", True)
    for folder in (student, reference, *teachers.values()):
        make_tokenizer().save_pretrained(folder)
    config = RunConfig(
        model=student,
        run_dir=str(tmp_path / "run"),
        data=DataConfig(str(path), max_prompt_tokens=8),
        actor=MegatronConfig(ranks=2, tp=2, optimizer=OptimizerConfig(lr=3e-3, lr_scheduler="constant")),
        rollout=VllmConfig(max_new_tokens=4, max_model_len=16, max_num_seqs=64, kv_cache_mb=64),
        algorithm=AlgorithmConfig(name="distill", reference=reference),
        distill=DistillConfig(teachers, top_k=32),
        steps=12,
        prompts_per_step=8,
        samples_per_prompt=4,
    )
    seen: list[TrainBatch] = []

    def see(batch: TrainBatch) -> Tensor:
        seen.append(batch)
        return distill(batch)

    with Trainer(config, exact_match, advantage=see) as trainer:
        trainer.fit()
    first, batch = read_metrics(tmp_path / "run")[1], seen[0]
    models = {"sums": load_folder(teachers["sums"]), "others": load_folder(reference), "student": load_folder(student)}
    found, off = [], 0.0
    prompts = {row.prompt_ids: row.source["data_source"] for row in trainer.rows}
    for number in range(len(batch)):
        one = batch.select(number, number + 1)
        source = next(name for prompt, name in prompts.items() if tuple(one.inputs[: len(prompt)].tolist()) == prompt)
        with torch.no_grad():
            own, theirs = (models[name](one.inputs[None]).logits[0].log_softmax(-1) for name in ("student", source))
        assert one.rollout_top_ids is not None and one.ref_top_logprobs is not None
        ids = one.rollout_top_ids[one.mask].long()
        wanted = join_classes(theirs[one.mask], ids)
        off = max(off, float((one.ref_top_logprobs[one.mask] - wanted).abs().max()))
        ours = join_classes(own[one.mask], ids)
        found.append((ours.exp() * (ours - wanted)).sum(-1))
    mean = float(torch.cat(found).mean())
    apart = {"teachers' logprobs": off, "KL, relative": abs(first["teacher_kl"] - mean) / mean}
    measured(apart)
    assert max(apart.values()) <= 1e-5
    kl = [step["teacher_kl"] for step in read_metrics(tmp_path / "run")[1:]]
    assert kl[-1] < 0.7 * kl[0], kl
