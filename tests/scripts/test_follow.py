"""The script that follows pages of the docs; following one to its end starts engines and is done by hand."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlworker

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "pages"))
import follow

sys.path.pop(0)

ROOT = Path(__file__).parents[2]

PAGE = """
Text, and a block that is shown alone:

```
not run
```

```python say.py
import os
print(os.environ["WHO"], os.path.exists("made"))
```

```sh
export WHO=you
touch made
```

```sh
python3 say.py > said
```
"""


def test_files_are_written_and_commands_run_in_one_environment(tmp_path):
    follow.follow(PAGE, tmp_path)
    assert (tmp_path / "said").read_text() == "you True\n"
    with pytest.raises(subprocess.CalledProcessError):
        follow.follow(PAGE + "```sh\nfalse\ntouch after\n```\n", tmp_path)
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("page", ["first_hour", "environments"])
def test_every_file_of_a_page_is_python_that_takes_public_names(page):
    found = follow.parse_blocks((ROOT / "docs" / f"{page}.md").read_text())
    files = {name: ast.parse(text, name) for name, text in found if name}
    taken = [
        alias.name
        for tree in files.values()
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "rlworker"
        for alias in node.names
    ]
    assert len(taken) > 10 and set(taken) <= set(rlworker.__all__)
    run = "".join(text for name, text in found if not name)
    assert len(files) >= 4 and all(name in run for name in files), "each is run"


def test_its_last_reward_is_what_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "heldout": 0.25}\n{"step": 1}\n{"step": 2, "heldout": 0.5}\n')
    assert follow.read_heldout_rewards(tmp_path) == [0.25, 0.5]
