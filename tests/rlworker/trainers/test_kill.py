"""One kill of a run; ``tests/kill_chain.py`` runs longer ones."""

import pytest
from kill_chain import Kill, draw_kills, run_chain

from recipes.common.addition import make_data, make_model

KILL = Kill("actor rank 1", step=3, phase="sync", delay_ms=10)


@pytest.mark.large
@pytest.mark.timeout(900)
def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(tmp_path, measured):
    make_data(tmp_path / "data")
    make_model(tmp_path / "model", seed=0)
    ended = run_chain(tmp_path, [KILL], steps=4)
    measured({"kills": ended["kills"], "seconds until the last process was gone": ended["longest_seconds"]})


def test_drawn_kills_come_in_an_order_that_a_chain_can_reach():
    kills = draw_kills(24, seed=7, steps=26)
    steps = [kill.step for kill in kills]
    assert steps == sorted(steps) and steps[0] == 1 and steps[-1] < 26
    assert all(kill.step % 2 == 0 for kill in kills if kill.phase == "save")
    assert len({kill.victim for kill in kills}) == 4 and len({kill.phase for kill in kills}) == 5
    assert kills == draw_kills(24, seed=7, steps=26) != draw_kills(24, seed=8, steps=26)
