"""Evaluation without training: what it is asked for, what it refuses, and what its command makes of a recipe."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from support.program import run_program

from engines.config import VllmConfig
from recipes.common.addition import make_data, make_model
from rlworker.__main__ import main
from rlworker.base.errors import RunError
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig
from rlworker.environments import exact_match


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "model", 0))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = make_data(tmp_path_factory.mktemp("data"))
    return DataConfig(heldout=str(folder / "heldout.jsonl"), max_prompt_tokens=8)


def refuse(config: RunConfig) -> str:
    from rlworker.trainers.launch import launch

    with pytest.raises(SystemExit) as end:
        launch(config, exact_match)
    return end.value.code


def test_it_asks_for_what_is_missing_before_anything_starts(model, data, tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", None)
    sizes, no_rows = VllmConfig(max_new_tokens=4, max_model_len=16), replace(data, heldout="")
    good = RunConfig(model=model, data=data, rollout=sizes, run_dir=str(tmp_path / "run"), evaluate=True)
    assert "evaluate: there are no held-out rows; set --data.heldout" in refuse(replace(good, data=no_rows))
    assert "evaluate: no folder for the results; set --run-dir" in refuse(replace(good, run_dir=""))
    assert "no-model" in refuse(replace(good, model=str(tmp_path / "no-model")))
    broken = replace(data, heldout_sets={"hard": str(tmp_path / "none.jsonl")})
    assert "none.jsonl' does not exist" in refuse(replace(good, data=broken))
    unknown = replace(good, validation=replace(good.validation, metric="heldout/hard"))
    assert "metric='heldout/hard' must be one of heldout; did you mean 'heldout'?" in refuse(unknown)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_its_model_and_a_run_names_its_checkpoints(tmp_path, monkeypatch):
    from rlworker.validation.program import find_weights, name_evaluation

    for step in (9, 10):
        (tmp_path / f"run/checkpoints/step_{step}/hf").mkdir(parents=True)
        (tmp_path / f"run/checkpoints/step_{step}/hf/config.json").write_text("{}")
    found = find_weights(f"{tmp_path}/run/checkpoints/step_9")
    assert found == f"{tmp_path}/run/checkpoints/step_9/hf" == find_weights(found)
    assert find_weights("hf:org/name") == "hf:org/name"
    with pytest.raises(
        ValueError, match=r"run' is the folder of a run; name one of its checkpoints, such as \S+step_10"
    ):
        find_weights(f"{tmp_path}/run")
    names = [found, "/models/Qwen2.5-0.5B", "models/lr@1e-5", "hf:org/name@main", "hf:org/Qwen2.5-0.5B"]
    expected = ["step_9", "Qwen2.5-0.5B", "lr@1e-5", "name", "Qwen2.5-0.5B"]
    assert [name_evaluation(name) for name in names] == expected
    monkeypatch.chdir(tmp_path / "run/checkpoints/step_9")
    assert name_evaluation(find_weights(".")) == "step_9"
    monkeypatch.chdir("hf")
    assert name_evaluation(find_weights(".")) == "step_9"


def test_a_full_disk_leaves_the_table_on_the_terminal(tmp_path, capsys):
    from rlworker.validation.program import Evaluation
    from rlworker.validation.validate import Validation

    evaluation = Evaluation.__new__(Evaluation)
    evaluation.config = RunConfig(model="model", run_dir=str(tmp_path))
    evaluation.model, evaluation.codec = SimpleNamespace(folder="model"), None

    def validate(running, folder):
        (folder / "validation.json").symlink_to("/dev/full")
        return Validation([], [{"set": "", "source": "", "rows": 3, "greedy": 0.625}], {"heldout": 0.625})

    evaluation._validate = validate
    with pytest.raises(RunError, match=r"evaluate: '.*evaluations/model' cannot .*: .*No space left.*free disk space"):
        evaluation.run()
    assert "heldout  3     0.625" in capsys.readouterr().out


def test_a_program_that_trains_by_itself_refuses_to(model, data, tmp_path):
    from rlworker.trainers.rl import Trainer

    config = RunConfig(model=model, data=data, run_dir=str(tmp_path / "run"), evaluate=True)
    with pytest.raises(ValueError, match="evaluate is set, and Trainer only trains"):
        Trainer(config, exact_match)


@pytest.fixture
def launched(monkeypatch):
    """What recipes have launched: settings and environment."""
    import rlworker.trainers.launch

    found = []
    monkeypatch.setattr(rlworker.trainers.launch, "launch", lambda *args, **parts: found.append(args))
    return found


def test_the_command_is_the_recipes_own_with_the_model_to_evaluate(launched, model, tmp_path):
    settings = ["--run-dir", tmp_path / "run", "--data.heldout", "test.jsonl", "--validation.samples", "8"]
    done = run_program(main, "evaluate", model, "recipes.grpo", *settings)
    assert done.returncode == 0, done.stderr
    ((config, environment),) = launched
    assert (config.model, config.evaluate, config.validation.samples) == (model, True, 8)
    assert environment.scorer.__name__ == "reward" and environment.answer.__name__ == "find_answer"


def test_a_recipe_of_its_own_may_be_a_file_with_others_beside_it(launched, model, tmp_path):
    (tmp_path / "own_rewards.py").write_text("def reward(text, row):\n    return 0.5\n")
    code = "from own_rewards import reward\nfrom rlworker import RunConfig, launch, parse_config\n\n"
    (tmp_path / "own.py").write_text(code + "launch(parse_config(RunConfig()), reward)\n")
    done = run_program(main, "evaluate", model, tmp_path / "own.py", "--seed", "3")
    assert done.returncode == 0, done.stderr
    ((config, reward),) = launched
    assert (config.seed, config.evaluate, reward("", None)) == (3, True, 0.5)


def test_a_demo_is_evaluated_on_the_rows_that_it_makes(launched, monkeypatch, model, tmp_path):
    import recipes.common.toys

    monkeypatch.setattr(recipes.common.toys, "launch", lambda *args: launched.append(args))
    done = run_program(main, "evaluate", model, "recipes.demos.cpu", "--run-dir", tmp_path / "demo")
    assert done.returncode == 0, done.stderr
    ((config, environment),) = launched
    assert environment is exact_match and config.model == model
    assert json.loads(open(config.data.heldout).readline()).keys() == {"prompt", "answer"}


@pytest.mark.parametrize("arguments", [(), ("model",)])
def test_the_command_without_a_recipe_asks_for_one(arguments):
    done = run_program(main, "evaluate", *arguments)
    assert done.returncode == 1 and "error: evaluate: give MODEL RECIPE [its settings]" in done.stderr


def test_a_recipe_that_is_not_there_is_named(model):
    done = run_program(main, "evaluate", model, "recipes.none")
    assert done.returncode == 1 and "error: evaluate: there is no module 'recipes.none'" in done.stderr
    done = run_program(main, "evaluate", model, "./none.py")
    assert done.returncode == 1 and "error: evaluate: './none.py' is no file" in done.stderr


def test_settings_that_differ_from_the_runs_are_named(data, tmp_path):
    """Those that decide what is asked and sampled; not the rows, the trainer's or the rates."""
    from rlworker.validation.program import list_differences

    (tmp_path / "checkpoints/step_2/hf").mkdir(parents=True)
    config = RunConfig(model=str(tmp_path / "checkpoints/step_2/hf"), data=data, evaluate=True)
    assert list_differences(config) == [], "no run is there to compare with"
    run = replace(config, data=replace(data, heldout="other", instruction="Think."), steps=7, evaluate=False)
    run = replace(run, rollout=replace(run.rollout, stop=("END",), max_num_seqs=8))
    (tmp_path / "config.json").write_text(json.dumps(asdict(run)))
    assert list_differences(config) == ["data.instruction 'Think.' -> ''", "rollout.stop ['END'] -> []"]
    assert list_differences(replace(config, model="/models/hf")) == []
