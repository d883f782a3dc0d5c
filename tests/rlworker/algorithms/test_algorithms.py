"""Every algorithm by its name against loops over sequences in float64, what wins over a name, and what is refused."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs
from engines.config import VllmConfig
from rlworker.algorithms import advantages, losses
from rlworker.algorithms.objective import make_objective
from rlworker.base.errors import RunError
from rlworker.config.algorithm import ALGORITHMS, AlgorithmConfig
from rlworker.config.command_line import parse_config
from rlworker.config.run import RunConfig
from rlworker.config.sections import CriticConfig

PROMPTS, GROUP, LONGEST, PROMPT = 3, 4, 10, 2
ROLLOUT = VllmConfig(max_new_tokens=LONGEST)


def configure(name: str, **settings) -> RunConfig:
    reference = "TEACHER" if name == "distill" else ""
    return RunConfig(algorithm=AlgorithmConfig(name, reference=reference, **settings), rollout=ROLLOUT)


def draw_batch(seed: int, turns: bool) -> tuple[TrainBatch, Tensor]:
    """Groups of sequences of 1 to 10 sampled ids behind a prompt of two, and the logprobs of the policy now.

    Args:
        turns: the first half of each sequence is turn 0 and ends with a reward, the rest is turn 1.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, LONGEST + 1, (PROMPTS * GROUP,), generator=generator).tolist()
    batch = TrainBatch.from_ids([[1] * (PROMPT + size) for size in sizes], [PROMPT] * len(sizes))
    n, b = batch.num_tokens, len(batch)
    draw = partial(torch.randn, generator=generator)
    old = -draw(n).abs() - 0.1
    columns = dict(old_logprobs=old, ref_logprobs=old + 0.3 * draw(n), values=draw(n))
    columns |= dict(rewards=draw(b), greedy_rewards=draw(b), group=torch.arange(b) // GROUP)
    if turns:
        parts = [[-1] * (PROMPT - 1) + [int(place >= (size + 1) // 2) for place in range(size)] for size in sizes]
        columns["turn"] = torch.tensor([turn for part in parts for turn in part], dtype=torch.int32)
        ends = (columns["turn"] == 0) & (columns["turn"].roll(-1) == 1)
        columns["turn_rewards"] = draw(n) * ends
    return replace(batch, **columns), old + 0.2 * draw(n)


class Loops:
    """An algorithm over lists of sequences, as its paper writes it: every number is a float64 scalar."""

    def __init__(self, batch: TrainBatch, logprobs: Tensor):
        ends = torch.tensor(batch.lengths).cumsum(0).tolist()
        spans = [range(end - length + PROMPT - 1, end) for end, length in zip(ends, batch.lengths)]
        read = lambda column: [[column[place].double() for place in span] for span in spans]  # noqa: E731
        self.now, self.old, self.ref = read(logprobs), read(batch.old_logprobs), read(batch.ref_logprobs)
        self.values = read(batch.values)
        self.given = read(torch.zeros(batch.num_tokens) if batch.turn_rewards is None else batch.turn_rewards)
        self.turns = None if batch.turn is None else read(batch.turn)
        for given, reward in zip(self.given, batch.rewards.double()):
            given[-1] = given[-1] + reward
        self.greedy, self.group = batch.greedy_rewards.double().tolist(), batch.group.tolist()
        self.sizes, self.count = [len(span) for span in spans], len(spans)
        self.total = sum(self.sizes)

    def peers(self, i: int) -> list[int]:
        return [j for j in range(self.count) if self.group[j] == self.group[i]]

    def reward(self, i: int) -> float:
        return float(sum(self.given[i]))

    def punish_kl(self, coef: float) -> None:
        for i in range(self.count):
            self.given[i] = [r - coef * (o - f) for r, o, f in zip(self.given[i], self.old[i], self.ref[i])]

    def punish_length(self, allowed: int, buffer: int) -> None:
        for i, size in enumerate(self.sizes):
            self.given[i][-1] = self.given[i][-1] - min(max((size - allowed) / buffer, 0.0), 1.0)

    def each(self, value) -> list[list[float]]:
        return [[value(i)] * size for i, size in enumerate(self.sizes)]

    def compare(self, i: int) -> float:
        """The reward less its group's mean, over the group's sample deviation."""
        rewards = torch.tensor([self.reward(j) for j in self.peers(i)], dtype=torch.float64)
        return (self.reward(i) - rewards.mean().item()) / (rewards.std().item() + 1e-4)

    def centre(self, i: int) -> float:
        return self.reward(i) - sum(self.reward(j) for j in self.peers(i)) / GROUP

    def leave_out(self, i: int) -> float:
        return self.reward(i) - sum(self.reward(j) for j in self.peers(i) if j != i) / (GROUP - 1)

    def compare_turns(self) -> list[list[float]]:
        to_go = [
            {t: sum(float(r) for r, turn in zip(self.given[i], self.turns[i]) if turn >= t) for t in set(map(int, own))}
            for i, own in enumerate(self.turns)
        ]
        result = []
        for i, own in enumerate(self.turns):
            row = []
            for turn in map(int, own):
                others = torch.tensor([to_go[j][turn] for j in self.peers(i) if turn in to_go[j]]).double()
                deviation = others.std().item() if len(others) > 1 else 0.0
                row.append((to_go[i][turn] - others.mean().item()) / (deviation + 1e-4))
            result.append(row)
        return result

    def whiten(self, rows: list[list[float]]) -> list[list[float]]:
        flat = [float(x) for row in rows for x in row]
        mean = sum(flat) / len(flat)
        deviation = (sum((x - mean) ** 2 for x in flat) / len(flat)) ** 0.5
        return [[(x - mean) / (deviation + 1e-8) for x in row] for row in rows]

    def to_go(self) -> list[list[float]]:
        return [[sum(row[t:]) for t in range(len(row))] for row in self.given]

    def estimate_advantages(self, lam: float = 0.95) -> list[list[float]]:
        """GAE with gamma 1: the sum over k of lambda^k (r + V' - V)."""
        rows = []
        for given, values in zip(self.given, self.values):
            deltas = [r + v_next - v for r, v, v_next in zip(given, values, [*values[1:], 0.0])]
            rows.append([sum(lam**k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))])
        return self.whiten(rows)

    def ratio(self, i: int, t: int) -> Tensor:
        return (self.now[i][t] - self.old[i][t]).exp()

    def clip(self, i: int, t: int, advantage: float, low: float = 0.2, high: float = 0.2) -> Tensor:
        ratio = self.ratio(i, t)
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)

    def clip_sequence(self, i: int, advantage: float) -> Tensor:
        ratio = (sum(n - o for n, o in zip(self.now[i], self.old[i])) / self.sizes[i]).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)

    def take_geometric_mean(self, i: int, advantage: float) -> Tensor:
        logs = [n - o for n, o in zip(self.now[i], self.old[i])]
        held = [torch.clamp(x, max=0.4) if advantage > 0 else torch.clamp(x, min=-0.4) for x in logs]
        return -(sum(held) / len(held)).exp() * advantage

    def weigh(self, i: int, t: int, advantage: float) -> Tensor:
        return -self.ratio(i, t).detach().clamp(0, 5) * advantage * self.now[i][t]

    def gate(self, i: int, t: int, advantage: float) -> Tensor:
        tau = 1.0 if advantage > 0 else 1.05
        return -torch.sigmoid(tau * (self.ratio(i, t) - 1)) * 4 / tau * advantage

    def kl3(self, i: int, t: int) -> Tensor:
        d = self.ref[i][t] - self.now[i][t]
        return d.exp() - 1 - d

    def kl2(self, i: int, t: int) -> Tensor:
        return (self.ref[i][t] - self.now[i][t]) ** 2 / 2

    def mean_of_tokens(self, term) -> Tensor:
        return sum(term(i, t) for i in range(self.count) for t in range(self.sizes[i])) / self.total

    def mean_of_sequences(self, term) -> Tensor:
        return (
            sum(sum(term(i, t) for t in range(self.sizes[i])) / self.sizes[i] for i in range(self.count)) / self.count
        )

    def sum_of_sequences(self, term) -> Tensor:
        """The mean over sequences of their sums, but for a constant."""
        return self.mean_of_tokens(term) * self.total / (LONGEST * self.count)

    def compute(self, name: str) -> Tensor:
        """The loss of a whole optimizer step."""
        mean = self.mean_of_tokens
        match name:
            case "grpo" | "turn_grpo":
                a = self.compare_turns() if name == "turn_grpo" else self.each(self.compare)
                return self.mean_of_sequences(lambda i, t: self.clip(i, t, a[i][t]) + 0.04 * self.kl3(i, t))
            case "dr_grpo":
                a = self.each(self.centre)
                return self.sum_of_sequences(lambda i, t: self.clip(i, t, a[i][t]))
            case "dapo":
                self.punish_length(LONGEST - 2, 2)
                a = self.each(self.compare)
                return mean(lambda i, t: self.clip(i, t, a[i][t], high=0.28))
            case "gspo" | "gmpo":
                term = self.clip_sequence if name == "gspo" else self.take_geometric_mean
                return sum(term(i, self.compare(i)) for i in range(self.count)) / self.count
            case "cispo":
                a = self.each(self.compare)
                return mean(lambda i, t: self.weigh(i, t, a[i][t]))
            case "sapo":
                a = self.each(self.compare)
                return self.mean_of_sequences(lambda i, t: self.gate(i, t, a[i][t]))
            case "rloo":
                self.punish_kl(0.03)
                a = self.each(self.leave_out)
                return self.sum_of_sequences(lambda i, t: self.clip(i, t, a[i][t]))
            case "reinforce_plus_plus":
                self.punish_kl(0.01)
                a = self.whiten(self.to_go())
                return mean(lambda i, t: self.clip(i, t, a[i][t]))
            case "reinforce_plus_plus_baseline":
                a = self.whiten(self.each(self.centre))
                return mean(lambda i, t: self.clip(i, t, a[i][t]) + 0.01 * self.kl2(i, t))
            case "remax":
                a = self.each(lambda i: self.reward(i) - self.greedy[i])
                return mean(lambda i, t: self.clip(i, t, a[i][t]))
            case "ppo":
                a = self.estimate_advantages()
                return mean(lambda i, t: self.clip(i, t, a[i][t]))
            case "distill":
                return mean(lambda i, t: self.clip(i, t, self.ref[i][t] - self.old[i][t]))
        raise AssertionError(name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_is_the_algorithm_of_its_paper(name, seed):
    """Loss and gradient of a whole step, from rewards and logprobs on."""
    batch, now = draw_batch(seed, turns=name == "turn_grpo")
    objective = make_objective(configure(name))
    logprobs = now.clone().requires_grad_()
    learned = objective.add_advantages(batch)
    weights, denominator = objective.aggregation(learned)
    outputs = TokenOutputs(logprobs, torch.zeros_like(logprobs))
    loss, _ = objective.loss(outputs, replace(learned, weights=weights))
    (loss / denominator).backward()

    exact = now.double().requires_grad_()
    want = Loops(batch, exact).compute(name)
    want.backward()
    assert loss.item() / denominator == pytest.approx(want.item(), abs=1e-6, rel=1e-6)
    error = (logprobs.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
    assert error <= 1e-6 and exact.grad.abs().max() > 1e-3


def test_what_is_set_wins_over_the_name():
    parts = AlgorithmConfig("dapo", clip_high=0.2, dynamic_sampling=0, aggregation="sequence_mean").parts
    assert (parts.clip_high, parts.dynamic_sampling, parts.aggregation) == (0.2, 0, "sequence_mean")
    assert (parts.overlong_buffer, parts.advantage) == (0.2, "grpo"), "the rest is the name's"
    assert "reference" in configure("grpo").roles and "reference" not in configure("grpo", kl_coef=0.0).models
    assert "critic" in configure("ppo").roles and configure("remax").algorithm.samples_greedily


def test_a_name_on_the_command_line_takes_the_place_of_a_recipes_own_parts():
    recipe = RunConfig(algorithm=AlgorithmConfig(kl_coef=0.001, kl_in="reward", clip_high=0.3, mini_batches=4))
    assert parse_config(recipe, args=[]).algorithm == recipe.algorithm
    named = parse_config(recipe, args=["--algorithm.name", "dapo", "--algorithm.kl-coef", "0.1"]).algorithm
    assert named == AlgorithmConfig("dapo", kl_coef=0.1, mini_batches=4)
    assert named.parts.clip_high == 0.28 and named.parts.kl_in == "loss"


def test_code_wins_over_its_part_and_the_other_options_hold():
    def own(batch):
        return batch.repeat_per_token(batch.rewards)

    objective = make_objective(configure("gspo", clip_high=0.1), advantage=own)
    assert objective.advantage is own and objective.aggregation is losses.sequence_mean
    surrogate = objective.loss.keywords["surrogate"]
    assert (surrogate.func, surrogate.keywords) == (losses.gspo, {"clip_high": 0.1})

    passed = partial(losses.policy_loss, surrogate=losses.cispo)
    objective = make_objective(configure("dapo"), loss=passed, aggregation=losses.sequence_mean)
    assert objective.loss.keywords["surrogate"] is losses.cispo, "the name's clips are those of its own surrogate"
    assert objective.aggregation is losses.sequence_mean and objective.advantage is advantages.grpo
    with pytest.raises(ValueError, match=r"^advantage: the code passes a function, and algorithm.advantage is 'rloo'"):
        make_objective(configure("", advantage="rloo"), advantage=own)
    with pytest.raises(
        ValueError, match=r"^loss: your code binds surrogate=.*leave surrogate out in the code, or leave --algorithm"
    ):
        make_objective(configure("", surrogate="ppo"), loss=passed)
    with pytest.raises(ValueError, match=r"^loss: algorithm.kl_coef is 0\.04, .* leave --algorithm.kl-coef out"):
        make_objective(configure("grpo"), loss=lambda outputs, batch: None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(name="gpso"), r"name must be one of grpo, .*, got 'gpso'; did you mean 'gspo'\?"),
        (dict(name="gspo", dual_clip=3.0), "dual_clip=3.0 is no parameter of surrogate gspo, which has .*clip-high"),
        (dict(name="sapo", clip_low=0.1), "clip_low=0.1 is no parameter of surrogate sapo, which has no clip"),
        (dict(surrogate="gspo"), "aggregation='token_mean' lets a sequence count by its length"),
        (dict(name="gmpo", advantage="turn_grpo"), "advantage='turn_grpo' differs from token to token"),
        (dict(name="distill", reference="T", dynamic_sampling=1), "dynamic_sampling=1 drops groups by a reward"),
        (dict(name="remax", kl_in="reward"), "kl_in='reward' needs a weight"),
        (dict(name="grpo", kl_estimate="k1"), "kl_estimate='k1' has a mean gradient of 0 in a loss"),
        (dict(importance_bounds=(0.5, 2.0)), r"importance_bounds=\(0.5, 2.0\) with importance auto must be an upper"),
        (
            dict(importance="masked", importance_bounds=(2.0, 0.5)),
            r"importance_bounds=\(2.0, 0.5\) with importance masked must be a lower and an upper bound",
        ),
        (dict(importance="sequence_masked", score_centering=4), "importance='sequence_masked' weighs whole sequences"),
    ],
)
def test_what_a_paper_excludes_is_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=f"^algorithm: {message}"):
        AlgorithmConfig(**settings)


def test_a_critic_beside_an_algorithm_without_values_is_refused():
    with pytest.raises(ValueError, match=r"^config: critic.train trains a critic, and advantage='grpo' does not read"):
        RunConfig(algorithm=AlgorithmConfig("gspo"), critic=CriticConfig(train=True))
    RunConfig(algorithm=AlgorithmConfig("ppo"), critic=CriticConfig(train=True))


def test_the_page_has_every_name():
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    table = page.partition("## By name")[2].partition("\n\n| name | source")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == [*ALGORITHMS]


def test_an_advantage_of_another_length_is_named():
    objective = make_objective(RunConfig(), advantage=lambda batch: torch.zeros(3))
    batch = TrainBatch.from_ids([[1, 2, 3]], [1])
    with pytest.raises(RunError, match=r"advantage: <function .* returned other columns than \[N\]: .* has 3 entries"):
        objective.add_advantages(batch)
