"""Count the lines of this project that one GRPO run over text imports, and the types that its episodes instantiate.

    python scripts/pages/run_lines.py [--files] [--types]

The run is real: a tiny model, two steps, one training rank, one rollout engine. Each of its processes notes what it
imports. A line counts unless it is blank or a comment. ``--files`` lists the files with their lines, ``--types`` the
classes of this project that any process instantiates between the first request of the second step and its groups.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
NOTE = """
import os, sys, threading, time

OURS = ("hardware", "engines", "rlworker", "recipes")

def note(*words):
    with open(os.environ["RUN_NOTES"], "a") as file:
        file.write(" ".join(words) + chr(10))

class Noting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in OURS:
            note("import", name)

def note_type(frame, event, _):
    name, (first, *_) = frame.f_code.co_name, (*frame.f_code.co_varnames[: frame.f_code.co_argcount], "")
    if event == "call" and first and (name in ("__init__", "__new__") or first == "_cls"):  # of a NamedTuple
        made = frame.f_locals[first]
        kind = made if isinstance(made, type) else type(made)
        if kind.__module__.split(".")[0] in OURS:
            note("type", str(time.time()), kind.__module__, kind.__qualname__)
    elif name in ("begin", "wait") and frame.f_code.co_filename.endswith("rollouts/loop.py"):
        note(event, str(time.time()), name)

sys.meta_path.insert(0, Noting)
if os.environ.get("RUN_TYPES"):
    threading.setprofile(note_type)
    sys.setprofile(note_type)
"""
"""``sitecustomize`` of the run's processes."""


def trace_run(folder: Path, traces_types: bool) -> list[list[str]]:
    """Run GRPO in a folder: the notes of its processes, as words."""
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
    environment = os.environ | {"PYTHONPATH": path, "RUN_NOTES": str(folder / "notes")}
    environment |= {"RUN_TYPES": "1"} if traces_types else {}
    subprocess.run([sys.executable, "-m", "recipes.grpo", *options], env=environment, cwd=ROOT, check=True)
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


def find_files(notes: list[list[str]]) -> set[Path]:
    """Find the files of this project that were imported."""
    places = [ROOT.joinpath(*name.split(".")) for kind, name, *_ in notes if kind == "import"]
    files = {file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")}
    return {file for file in files | {ROOT / "recipes" / "grpo.py"} if file.is_file()}


def count_lines(file: Path) -> int:
    """Count the lines of a file that are neither blank nor a comment."""
    return sum(1 for line in file.read_text().splitlines() if (text := line.strip()) and text[0] != "#")


def list_types(notes: list[list[str]]) -> list[str]:
    """List the types that were instantiated while the episodes of the last rollout ran."""
    begun = [time for kind, time, *name in notes if (kind, name) == ("call", ["begin"])]
    done = [time for kind, time, *name in notes if (kind, name) == ("return", ["wait"])]
    made = [(time, ".".join(name)) for kind, time, *name in notes if kind == "type"]
    return list(dict.fromkeys(name for time, name in sorted(made) if begun[-1] <= time <= done[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--types", action="store_true")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        notes = trace_run(Path(folder), asked.types)
    lines = {file.relative_to(ROOT): count_lines(file) for file in find_files(notes)}
    for file in sorted(lines) if asked.files else ():
        print(f"{lines[file]:5d} {file}")
    print(f"{sum(lines.values())} lines in {len(lines)} files")
    if asked.types:
        types = list_types(notes)
        print(*types, f"{len(types)} types", sep="\n")


if __name__ == "__main__":
    main()
