"""Models of the hub by their names, in a cache that the tests fill and from a server of theirs: what is found, on every
node and at every start the same, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import pytest

from engines.config import VllmConfig
from engines.models.hub import find_model
from engines.models.spec import ModelSpec
from recipes.common.addition import make_tokenizer
from rlworker.checks.plan.recipe import plan_recipe
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.command_line import parse_config
from rlworker.config.run import RunConfig
from rlworker.config.sections import CriticConfig, DataConfig
from rlworker.config.sft import SftConfig

NAME = "hf:org/tiny"
OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
"""Names of commits."""


def fill_cache(cache: Path, folder: Path, commit: str, *refs: str) -> Path:
    """Lay a folder into a cache as one commit of the model ``NAME``, at which ``refs`` point; returns its snapshot."""
    repository = cache / "models--org--tiny"
    snapshot = repository / "snapshots" / commit
    for path in (repository / "blobs", repository / "refs", snapshot):
        path.mkdir(parents=True, exist_ok=True)
    for path in (path for path in folder.iterdir() if path.is_file()):
        blob = repository / "blobs" / sha256(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    for ref in refs:
        (repository / "refs" / ref).write_text(commit)
    return snapshot


@contextmanager
def serve_hub(folder: Path, commit: str, gated: bool) -> Iterator[None]:
    """Have the hub serve a folder as whatever repository and revision is asked for; gated, its files are kept back."""
    from huggingface_hub import constants

    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                data, status = files[self.path.rpartition("/")[2]], 403 if gated else 200
            elif "/tree/" in self.path:
                tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files.items()]
                data, status = json.dumps(tree).encode(), 200
            else:
                data, status = json.dumps({"id": "org/tiny", "sha": commit, "siblings": []}).encode(), 200
            self.send_response(status)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            if status == 403:
                self.send_header("X-Error-Code", "GatedRepo")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, format: str, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    path = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    try:
        with patch.multiple(constants, ENDPOINT=url, HUGGINGFACE_CO_URL_TEMPLATE=url + path, HF_HUB_OFFLINE=False):
            yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def folder(make_hf_model, tmp_path) -> Path:
    shutil.copytree(make_hf_model("qwen2", True), tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_text("not to be downloaded")
    return tmp_path / "model"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def make_config(tmp_path: Path, **changes) -> RunConfig:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    return RunConfig(
        model=NAME,
        run_dir=str(tmp_path / "run"),
        data=DataConfig(str(tmp_path / "rows.jsonl"), max_prompt_tokens=8),
        rollout=VllmConfig(max_new_tokens=4, max_model_len=16, kv_cache_mb=64),
        **changes,
    )


def test_a_model_of_the_hub_is_the_commit_that_its_cache_has(folder, cache, tmp_path, monkeypatch):
    old, new = fill_cache(cache, folder, OLD, "v1"), fill_cache(cache, folder, NEW, "main")
    revisions = {"": new, "@main": new, "@v1": old, f"@{OLD}": old}
    assert {end: find_model(NAME + end) for end in revisions} == {end: str(path) for end, path in revisions.items()}
    assert find_model(NAME, OLD) == str(old), "a commit that is given is taken, whatever main is"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:org").mkdir()
    (tmp_path / NAME).symlink_to(folder)
    assert find_model(NAME) == NAME, "a folder that exists comes first"


def test_every_setting_that_names_a_model_takes_one_of_the_hub(folder, cache, tmp_path):
    from recipes import grpo_gsm8k

    snapshot = str(fill_cache(cache, folder, OLD, "main"))
    config = make_config(
        tmp_path, critic=CriticConfig(train=True, model=NAME), algorithm=AlgorithmConfig(reference=NAME)
    )
    assert {role: model.folder for role, model in config.check_models().items()} == dict.fromkeys(
        ("actor", "reference", "critic"), snapshot
    )
    sft = SftConfig(model=NAME, data=config.data, max_answer_tokens=8)
    assert sft.check_models()["actor"].folder == snapshot
    shutil.rmtree(cache)
    (folder / "model.safetensors").unlink()
    fill_cache(cache, folder, OLD, "main")
    lengths = {"rollout.max-model-len": 256, "rollout.max-new-tokens": 64, "data.max-prompt-tokens": 64}
    arguments = ["--model", NAME, *(word for name, value in lengths.items() for word in (f"--{name}", str(value)))]
    assert "actor" in plan_recipe("recipes.grpo", arguments, 16.0)[0], "a plan needs config.json alone"
    recipe = parse_config(grpo_gsm8k.DEFAULT, args=["--model", NAME])
    assert (recipe.actor.tp, recipe.actor.ranks) == (4, 8), "four heads"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (NAME, r"'hf:org/tiny' is not whole in the hub's cache, and the hub was not reached: set HF_HUB_OFFLINE=0"),
        ("hf:tiny", r"'hf:tiny' is no folder, expected hf:ORG/NAME or hf:ORG/NAME@REVISION"),
        ("hf:org/tiny@", r"'hf:org/tiny@' is no folder, expected"),
        ("hf:o--rg/tiny", r"'hf:o--rg/tiny' cannot be had from the hub: HFValidationError: .*--"),
        ("org/tiny", r"folder 'org/tiny' does not exist; give the path of a saved .*, or hf:ORG/NAME for one"),
    ],
)
def test_what_the_cache_lacks_is_refused_by_name(cache, tmp_path, name, message):
    from rlworker.trainers.launch import check_run

    with pytest.raises(ValueError, match=rf"^model: {message}"):
        check_run(replace(make_config(tmp_path), model=name))
    assert not (tmp_path / "run").exists()


def test_a_model_is_downloaded_and_a_gated_one_named(folder, cache):
    gate = pytest.raises(ValueError, match=r"'hf:org/tiny' is gated: accept its terms at")
    with serve_hub(folder, NEW, gated=True), gate:
        find_model(NAME)
    with serve_hub(folder, NEW, gated=False):
        snapshot = Path(find_model(NAME))
    assert snapshot == cache / "models--org--tiny" / "snapshots" / NEW
    downloaded = {path.name: path.read_bytes() for path in snapshot.iterdir()}
    assert downloaded == {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "pytorch_model.bin"}
    assert find_model(NAME) == str(snapshot)


def test_resume_keeps_the_commit_that_the_run_began_with(folder, cache, tmp_path):
    """The hub's main moves on in between: a resumed run stays, a new one takes the newest, another revision is another
    run."""
    from rlworker.trainers.launch import check_run

    old = fill_cache(cache, folder, OLD, "main")
    config = make_config(tmp_path)
    run = check_run(config)
    run.begin(config)
    run.release()
    fill_cache(cache, folder, NEW, "main")
    resumed = check_run(replace(config, resume=True))
    found = replace(config, resume=True).check_models(resumed.inputs.find_model)
    assert found["actor"].folder == str(old) and ModelSpec.from_folder(find_model(NAME)).folder.endswith(NEW)
    resumed.begin(replace(config, resume=True))
    resumed.release()
    with pytest.raises(ValueError, match=r"cannot be resumed .*model was 'hf:org/tiny', is 'hf:org/tiny@main'"):
        check_run(replace(config, resume=True, model=f"{NAME}@main"))
    shutil.rmtree(old)
    with pytest.raises(ValueError, match=rf"model: 'hf:org/tiny' at {OLD} is not whole in the hub's cache"):
        check_run(replace(config, resume=True))


def test_every_node_has_the_same_commit_in_its_own_cache(folder, cache, tmp_path, monkeypatch):
    from rlworker.cluster.node_checks import Needs, look

    here = str(fill_cache(cache, folder, OLD, "main"))
    model, needs = ModelSpec.from_folder(here), Needs((here,), (), str(tmp_path / "token"))
    expected = look(needs)[f"model {here!r}"]
    shutil.move(cache, tmp_path / "moved")
    assert look(needs)[f"model {here!r}"].startswith(f"not to be had (model: 'hf:org/tiny' at {OLD} is not whole")
    with pytest.raises(ValueError, match=f"'hf:org/tiny' at {OLD} is not whole"):
        model.move_here()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "moved"))  # as another node has it
    assert look(needs)[f"model {here!r}"] == expected
    assert model.move_here() == replace(model, folder=here.replace(str(cache), str(tmp_path / "moved")))
