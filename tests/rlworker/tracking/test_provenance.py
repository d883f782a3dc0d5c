"""Where figures come from: the command as anyone would type it, the commit, and what is installed."""

import importlib.metadata
import subprocess
from datetime import UTC, datetime

import pytest

from rlworker.tracking import provenance
from rlworker.tracking.provenance import ROOT, clean_command, collect_provenance, read_commit


@pytest.mark.parametrize(
    ("arguments", "module", "expected"),
    [
        ([str(ROOT / "scripts/bench/head.py"), "--tiny"], "", "python scripts/bench/head.py --tiny"),
        (["/home/me/own.py", "--model=/data/llama", "--lr=1e-3"], "", "python own.py --model=llama --lr=1e-3"),
        (["x", "--json", "/tmp/a", "--ranks", "2"], "recipes.grpo", "python -m recipes.grpo --ranks 2"),
        (["x", "--seed", "1", "--run_dir=/tmp/a"], "pytest.__main__", "python -m pytest --seed 1"),
        (["x", "--run-dir", "runs/a", "--json"], "recipes.grpo", "python -m recipes.grpo"),
        (["x", "-k", "a or b", str(ROOT / "tests")], "pytest", "python -m pytest -k 'a or b' tests"),
    ],
)
def test_a_command_has_no_folders_of_the_machine_and_no_outputs(arguments, module, expected):
    assert clean_command(arguments, module) == expected


def test_the_commit_is_that_of_the_code_and_says_where_the_code_differs(tmp_path):
    def git(*command: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *command]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    assert read_commit(tmp_path) == "unknown", "nothing is committed yet"
    (tmp_path / "a.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    git("tag", "v1")
    commit = git("rev-parse", "--short", "HEAD")
    assert read_commit(tmp_path) == commit
    (tmp_path / "notes.txt").write_text("")
    assert read_commit(tmp_path) == commit, "what git does not track changes no code"
    (tmp_path / "a.py").write_text("a = 2\n")
    assert read_commit(tmp_path) == f"{commit}+"
    (tmp_path / "below").mkdir()
    assert read_commit(tmp_path / "below") == importlib.metadata.version("rlworker"), "that repository is another's"


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert read_commit(tmp_path) == "unknown"


def test_it_names_machine_and_libraries(monkeypatch):
    monkeypatch.setitem(provenance._LIBRARIES, "nothing", ("no-such-distribution",))
    found = collect_provenance("npu-emulated")
    assert found.platform == "npu-emulated (emulated)"
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found.date)).total_seconds()) < 60
    for library in ("torch", "megatron-core", "ray", "transformers"):
        assert found.versions[library] == importlib.metadata.version(library)
    assert "vllm" in found.versions and "nothing" not in found.versions
    assert " cores, " in found.device and found.device.endswith(" GiB")
    with pytest.raises(ValueError, match="platform: 'abacus' is not available"):
        collect_provenance("abacus")
