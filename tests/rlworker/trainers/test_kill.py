"""One kill of a run; ``tests/kill_chain.py`` runs longer chains."""

import pytest
from kill_chain import Kill, run_chain

from recipes.common.addition import make_data, make_model

KILLS = [Kill("driver", step=3, phase="evaluate", delay_ms=30)]


@pytest.mark.large
@pytest.mark.timeout(900)
def test_a_run_whose_driver_is_killed_ends_as_if_it_had_not_been(tmp_path, measured):
    make_data(tmp_path / "data")
    make_model(tmp_path / "model", seed=0)
    ended = run_chain(tmp_path, KILLS, steps=3)
    measured({"kills": ended["kills"], "seconds until the last process was gone": ended["longest_seconds"]})
