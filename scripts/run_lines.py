"""Count the lines of this project that one GRPO run over text imports.

    python scripts/run_lines.py [--files]

The run is real: a tiny model, two steps, one training rank, one rollout engine. Each of its processes notes what it
imports. A line counts unless it is blank or a comment. ``--files`` lists the files with their lines.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
NOTE = """
import os, sys

class Noting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("hardware", "engines", "rlworker", "recipes"):
            with open(os.environ["RUN_LINES"], "a") as file:
                file.write(name + chr(10))

sys.meta_path.insert(0, Noting)
"""
"""``sitecustomize`` of the run's processes."""


def trace_run(folder: Path) -> set[Path]:
    """Run GRPO in a folder: the files of this project that its processes import."""
    from recipes.common.addition import make_data, make_model

    model = make_model(folder / "model", seed=0)
    make_data(folder / "data")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(NOTE)
    path = os.pathsep.join(filter(None, (f"{folder}/site", str(ROOT), os.environ.get("PYTHONPATH"))))
    options = ["--model", str(model), "--run-dir", str(folder / "run"), "--steps", "2", "--prompts-per-step", "4"]
    options += ["--data.train", f"{folder}/data/train.jsonl", "--samples-per-prompt", "2", "--environment.workers", "1"]
    options += ["--rollout.max-new-tokens", "8", "--rollout.max-model-len", "64", "--rollout.kv-cache-mb", "64"]
    options += ["--data.max-prompt-tokens", "16", "--actor.dtype", "float32", "--rollout.dtype", "float32"]
    environment = os.environ | {"PYTHONPATH": path, "RUN_LINES": str(folder / "imports")}
    subprocess.run([sys.executable, "-m", "recipes.grpo", *options], env=environment, cwd=ROOT, check=True)
    places = [ROOT.joinpath(*name.split(".")) for name in set((folder / "imports").read_text().split())]
    files = {file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")}
    return {file for file in files | {ROOT / "recipes" / "grpo.py"} if file.is_file()}


def count_lines(file: Path) -> int:
    """Count the lines of a file that are neither blank nor a comment."""
    return sum(1 for line in file.read_text().splitlines() if (text := line.strip()) and text[0] != "#")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true")
    lists_files = parser.parse_args().files
    with TemporaryDirectory() as folder:
        lines = {file.relative_to(ROOT): count_lines(file) for file in trace_run(Path(folder))}
    for file in sorted(lines) if lists_files else ():
        print(f"{lines[file]:5d} {file}")
    print(f"{sum(lines.values())} lines in {len(lines)} files")


if __name__ == "__main__":
    main()
