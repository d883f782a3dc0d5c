"""A real Gymnasium environment is played by text: each step is what the package itself does."""

import gymnasium
import pytest
from support.environments.agents import make_chat_row, run, tell_chat
from support.environments.runners import LocalPool, make_rows, run_episodes, tell

pytestmark = [pytest.mark.large, pytest.mark.timeout(120)]
MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
WAY = ["down", "down", "fly", "right", "right", "down", "right"]


def read(text, game):
    word = text.strip("~ ")
    if word not in MOVES:
        raise ValueError(f"{word} is no move, there are {', '.join(MOVES)}")
    return MOVES[word]


@pytest.fixture(scope="module")
def environment():
    from rlworker.environments.adapters.gymnasium import GymnasiumEnvironment

    return GymnasiumEnvironment(lambda row: gymnasium.make("FrozenLake-v1", is_slippery=False), read, "at {}.".format)


def test_a_game_is_won_by_the_moves_that_win_it(environment):
    (record,) = run(environment, [make_chat_row()], lambda ids, number: WAY[number])
    assert record.failure is None and record.forks == 0 and record.turns == len(WAY)
    assert record.rewards == ((0, 0.0), (1, 0.0), (3, 0.0), (4, 0.0), (5, 0.0), (6, 1.0))
    game, told = gymnasium.make("FrozenLake-v1", is_slippery=False), []
    told.append(game.reset(seed=0)[0])
    told += [game.step(MOVES[move])[0] for move in WAY if move in MOVES][:-1]
    heard = "".join(text for turn, text in tell_chat(record)[0] if turn < 0)
    assert [int(part.split(".")[0]) for part in heard.split("at ")[1:]] == told
    assert "error: fly is no move, there are left, down, right, up" in heard


def test_a_game_is_lost_cut_and_played_in_plain_text(environment):
    """Right, then down, is a hole; an episode that reaches its limit keeps what it has."""
    (lost,) = run_episodes(
        LocalPool(environment), make_rows("play: "), say=lambda ids, number: ["right", "down"][number]
    )
    assert lost.failure is None and lost.rewards == ((0, 0.0), (1, 0.0)) and lost.turns == 2
    assert [text for turn, text in tell(lost)[0] if "at" in text and turn < 0] == ["at 0.<unk>", "<unk>at 1.<unk>"]
    (cut,) = run(environment, [make_chat_row()], lambda ids, number: "up")
    assert cut.failure is None and cut.turns == 8 and cut.reward == 0.0
