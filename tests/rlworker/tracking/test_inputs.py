"""--resume on a model or rows that changed since the run began: refused by name, however well the change hides."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from engines.config import LoraConfig
from engines.models.folders.adapter_folder import save_adapter_folder
from engines.models.spec import ModelSpec
from recipes.common.addition import make_tokenizer
from rlworker.checks.tiny.models import IMAGE_TOKENS, make_tiny_vlm
from rlworker.config.sections import DataConfig
from rlworker.config.sft import SftConfig
from rlworker.tracking.inputs import Inputs

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
STEP = "checkpoints/step_N/hf"


@pytest.fixture(scope="module")
def made(make_hf_model, tmp_path_factory) -> Path:
    """A folder that has a model and rows of it, and a model that sees with its rows and images."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(make_hf_model("qwen2", True), folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    make_tiny_vlm(folder / "seeing", "qwen2_5_vl", make_tokenizer(None, IMAGE_TOKENS), 128)
    for name in ("train", "heldout", "hard"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shown = [{"prompt": "<image>", "answer": "1", "images": [name]} for name in ("a.png", "b.png")]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    for name, colour in (("a", 0), ("b", 255)):
        Image.new("L", (28, 28), colour).save(folder / f"{name}.png")
    return folder


def begin(config: SftConfig) -> str:
    """Begin a run, or go on with it, up to its first step but without engines; returns what is told of it."""
    from rlworker.trainers.sft import SftTrainer

    folder = SftTrainer(config).folder
    folder.claim(config)
    _, told = folder.begin(config)
    folder.record_start(0, config)
    folder.release()
    return told


@pytest.fixture
def begun(made, tmp_path):
    folder = tmp_path / "inputs"
    shutil.copytree(made, folder)

    def begin_run(model: str = "model", train: str = "train.jsonl", save=lambda folder: None) -> tuple[SftConfig, Path]:
        save(folder)
        sets = {"hard": str(folder / "hard.jsonl")}
        data = DataConfig(str(folder / train), str(folder / "heldout.jsonl"), sets, max_prompt_tokens=16)
        data = data if train == "train.jsonl" else replace(data, heldout="", heldout_sets={})
        config = SftConfig(str(folder / model), str(tmp_path / "run"), data, rows_per_step=2, max_answer_tokens=8)
        begin(config)
        return replace(config, resume=True), folder

    return begin_run


def keep_times(path: Path, change: Callable[[Path], object]) -> None:
    before = path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns


def train_one_row(path: Path) -> None:
    weights = load_file(path)
    weights["model.embed_tokens.weight"][5] += np.float32(1e-6)
    save_file(weights, path, metadata={"format": "pt"})


def swap(old: str, new: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train.jsonl", swap('"2"', '"3"'), r"data\.train \S+train\.jsonl was 136 bytes, digest \w+, is 136 bytes,"),
        ("heldout.jsonl", swap("2+2", "3+3"), r"data\.heldout \S+heldout\.jsonl was 136 bytes, digest \w+, is 136"),
        ("hard.jsonl", swap("2+2", "3+3"), r"data\.heldout_sets hard \S+hard\.jsonl was 136 bytes, digest \w+, is 136"),
        ("model/model.safetensors", train_one_row, r"actor model\.safetensors was \d+ bytes, digest \w+, is \d+ bytes"),
        ("model/tokenizer.json", swap("9", "8"), r"actor tokenizer\.json was \d+ bytes, digest \w+, is \d+ bytes"),
        ("model/config.json", swap("1e-06", "1e-05"), r"actor config\.json was \d+ bytes, digest \w+, is \d+ bytes"),
    ],
    ids=["row", "heldout", "set", "weight", "tokenizer", "config"],
)
def test_a_changed_input_is_named_however_alike_the_file_looks(begun, name, change, message):
    config, folder = begun()
    begin(config)
    keep_times(folder / name, change)
    advice = rf"Put back the old model and data, or start a new run .* --model \S+{STEP}"
    with pytest.raises(ValueError, match=rf"^run_dir: .* cannot be resumed with another .* data: {message}.*{advice}"):
        begin(config)


def test_adapters_to_start_from_may_move_and_not_change(begun):
    config, folder = begun()
    lora = LoraConfig(rank=4, targets=("q_proj",))
    spec = ModelSpec.from_folder(folder / "model")
    values = {name: torch.ones(shape) for one in lora.list_adapters(spec) for name, shape in one.tensors.items()}
    save_adapter_folder(values.items(), lora.peft_settings, "", str(folder / "adapter"))
    lora = replace(lora, start=str(folder / "adapter"))
    config = replace(config, run_dir=f"{config.run_dir}-adapted", actor=replace(config.actor, lora=lora))
    begin(replace(config, resume=False))

    from rlworker.trainers.sft import SftTrainer

    inputs = SftTrainer(config).folder.inputs  # of which every node must see the folders
    assert inputs.model_folders == {config.model, lora.start}
    (folder / "adapter").rename(folder / "moved")
    config = replace(config, actor=replace(config.actor, lora=replace(lora, start=str(folder / "moved"))))
    begin(config)
    values[next(iter(values))][0, 0] += 1e-3
    save_file({name: value.numpy() for name, value in values.items()}, folder / "moved" / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=r"actor\.lora\.start adapter_model\.safetensors was \d+ bytes, digest \w+, is"
    ):
        begin(config)


def test_everything_that_changed_is_named_rows_before_anything_is_imported(begun):
    from rlworker.trainers.launch import check_run

    config, folder = begun()
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps(ROWS[0]))
    with pytest.raises(ValueError, match=r"data: data\.train .* was 136 bytes, .* is 169 bytes"):
        check_run(config)
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ValueError, match=r"actor chat_template\.jinja was not there, is 14 bytes, .*; data\.train"):
        begin(config)


def test_rows_of_a_data_set_are_what_they_say_however_its_files_lie(begun):
    from datasets import Dataset

    saved = [Dataset.from_list(rows) for rows in (ROWS, ROWS, [*ROWS[:3], ROWS[0]])]
    config, folder = begun(train="saved", save=lambda folder: saved[0].save_to_disk(folder / "saved"))
    for number, again in enumerate(saved[1:]):
        shutil.rmtree(folder / "saved")
        again.save_to_disk(folder / "saved", num_shards=2)
        if number == 0:
            begin(config)
    with pytest.raises(ValueError, match=r"data\.train \S+saved was 4 rows, digest \w+, is 4 rows, digest \w+"):
        begin(config)


def test_another_image_under_the_same_path_is_named(begun):
    config, folder = begun("seeing", "shown.jsonl")
    begin(config)
    Image.new("L", (28, 28), 7).save(folder / "b.png")
    with pytest.raises(ValueError, match=r"data images was 2, digest \w+, is 2, digest \w+\. Put back"):
        begin(config)


def test_a_run_that_was_moved_with_its_inputs_goes_on_and_tells_their_paths(begun, tmp_path):
    from rlworker.trainers.launch import check_run

    _, folder = begun()
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "run", moved / "run")
    shutil.move(folder, moved / "inputs")
    data = DataConfig(
        str(moved / "inputs/train.jsonl"),
        str(moved / "inputs/heldout.jsonl"),
        {"hard": str(moved / "inputs/hard.jsonl")},
        max_prompt_tokens=16,
    )
    config = SftConfig(str(moved / "inputs/model"), str(moved / "run"), data, rows_per_step=2, max_answer_tokens=8)
    config = replace(config, resume=True)
    check_run(config).release()
    told = begin(config)
    for name, was in (("data.train", "train.jsonl"), ("data.heldout", "heldout.jsonl"), ("model", "model")):
        assert f"{name} {folder / was} -> {moved / 'inputs' / was}" in told
    assert "with other settings" not in begin(config)
    with pytest.raises(ValueError, match=r"other settings of its model, its data.* data\.heldout was .*, is ''\. Set"):
        begin(replace(config, data=replace(data, heldout="")))
    with pytest.raises(ValueError, match=r"data\.heldout_sets was .*'hard'.*, is .*'easy'"):
        begin(replace(config, data=replace(data, heldout_sets={"easy": data.heldout_sets["hard"]})))
    other = moved / "other.jsonl"
    other.write_text((moved / "inputs/train.jsonl").read_text().replace('"2"', '"3"', 1))
    with pytest.raises(ValueError, match=r"data\.train was \S*train\.jsonl \(\d+ bytes, .*, is \S*other\.jsonl \("):
        begin(replace(config, data=replace(data, train=str(other))))
    shutil.copytree(moved / "inputs/model", moved / "model")
    train_one_row(moved / "model/model.safetensors")
    with pytest.raises(ValueError, match=r"actor model\.safetensors was \d+ bytes, digest \w+, is \d+ bytes"):
        begin(replace(config, model=str(moved / "model")))
    (moved / "run/inputs.json").unlink()
    with pytest.raises(ValueError, match=r"other settings of its model, its data.* data\.train was"):
        begin(replace(config, data=replace(data, train=str(other))))


def test_a_run_of_before_there_were_digests_says_so_and_has_them_from_then_on(begun):
    config, _ = begun()
    path = Path(config.run_dir) / "inputs.json"
    path.unlink()
    assert "NOTE it had no inputs.json" in begin(config)
    assert "NOTE" not in begin(config) and {"actor", "data.train"} <= json.loads(path.read_text()).keys()
    path.write_text("{")
    with pytest.raises(ValueError, match=r"inputs\.json' cannot be read: .*; restore it from a copy"):
        begin(config)


def test_a_further_source_that_changed_is_named_too(tmp_path):
    """Whatever its weight; one that is data.train itself is read once."""
    data = DataConfig(str(tmp_path / "a.jsonl"))
    sources = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    for source in sources:
        Path(source).write_text(json.dumps(ROWS[0]) + "\n")
    inputs = Inputs(tmp_path)
    inputs.hold(data, sources=sources)
    inputs.write()
    (tmp_path / "config.json").write_text("{}")
    assert list(json.loads((tmp_path / "inputs.json").read_text())) == [
        "data.train",
        f"curriculum.sources {sources[1]}",
    ]
    Inputs(tmp_path).hold(data, sources=sources)
    Path(sources[1]).write_text(json.dumps(ROWS[1]) + "\n")
    with pytest.raises(ValueError, match=r"other data: curriculum\.sources \S+b\.jsonl \S+b\.jsonl was 34 bytes"):
        Inputs(tmp_path).hold(data, sources=sources)
