"""What is done without importing torch or another of the large libraries, which take seconds."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
from pathlib import Path

def imported(*names):
    return [name for name in names if name in sys.modules]

model, rows, parquet, saved, folder = sys.argv[1:]
found = {}

from rlworker import DataConfig, MegatronConfig, Row, RunConfig, SftConfig, exact_match, launch
found["names"] = imported("torch", "transformers", "megatron", "vllm", "datasets", "pyarrow", "plotly")

from rlworker.tracking.log import RunLog
from rlworker.tracking.trackers import TrackedRun, Trackers, check_trackers
check_trackers(["tensorboard", "wandb"])
Path(folder).mkdir()
with RunLog(Path(folder), 1, 0, Trackers([], TrackedRun(Path(folder), 0, {}))) as log:
    log.step(1, {"reward": 0.5})
found["log"] = imported("torch", "tensorboard", "wandb")

from rlworker.data.rows import check_rows
data = DataConfig(rows, rows, max_prompt_tokens=8)
check_rows(rows, data)
found["rows"] = imported("torch", "transformers", "datasets", "pyarrow")

from engines.config import VllmConfig
from rlworker.trainers.launch import check_run
actor = MegatronConfig(ranks=2, megatron={"init_method_std": 0.1})
rollout = VllmConfig(max_new_tokens=8, max_model_len=32, vllm={"enable_prefix_caching": True})
check_run(RunConfig(model=model, run_dir=f"{folder}/run", data=data, actor=actor, rollout=rollout))
found["settings"] = imported("torch", "transformers", "megatron", "vllm", "datasets", "pyarrow", "plotly")

check_rows(parquet, data)
check_rows(saved, data)
found["tables"] = imported("torch", "transformers", "datasets", "pyarrow")
print(json.dumps(found))
"""


def test_settings_and_rows_are_checked_and_steps_told_without_torch(make_hf_model, tmp_path):
    """One process that does one after the other, so that what is imported for one would show in those after it."""
    from datasets import Dataset

    row = {"prompt": "1+1=", "answer": "2"}
    rows, parquet, saved, folder = (tmp_path / name for name in ("rows.jsonl", "rows.parquet", "saved", "folder"))
    rows.write_text(json.dumps(row))
    table = Dataset.from_list([row])
    table.to_parquet(parquet)
    table.save_to_disk(saved)
    arguments = [make_hf_model("qwen2", True), *map(str, (rows, parquet, saved, folder))]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    light = {key: [] for key in ("names", "log", "rows", "settings")}
    assert json.loads(done.stdout.splitlines()[-1]) == light | {"tables": ["datasets", "pyarrow"]}
    assert done.stderr == ""
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "run"}, "no tracker wrote anything"
