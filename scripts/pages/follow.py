"""Follow a page of the docs word for word: its files are written, its commands run, one after another.

    .venv/bin/python scripts/pages/follow.py docs/first_hour.md [FOLDER]
    .venv/bin/python scripts/pages/follow.py docs/environments.md [FOLDER]

A fenced block ``python NAME`` becomes the file NAME; a block ``sh`` is run by bash. Other blocks are not followed. The
first command that fails ends it. At the end the held-out reward of the run ``runs/mine`` is compared with that of the
model before.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(sh|python (\S+))\n(.*?)^```$", re.M | re.S)
ENOUGH = 0.9
"""Mean held-out reward that the trained model must reach."""


def parse_blocks(page: str) -> list[tuple[str | None, str]]:
    """Return the page's blocks in order: ``(file name, text)``, the name being None where the text is run."""
    return [(name or None, text) for _, name, text in _BLOCK.findall(page)]


def follow(page: str, folder: Path) -> None:
    """Write each file into ``folder`` and run each command there, in one environment that ``export`` changes.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    exports = []
    for name, text in parse_blocks(page):
        if name:
            (folder / name).write_text(text)
            continue
        print(f"\n$ {text.strip()}", flush=True)
        environment = os.environ | {"RLWORKER": str(ROOT), "HF_HUB_OFFLINE": "1"}
        subprocess.run(["bash", "-euc", "\n".join([*exports, text])], cwd=folder, env=environment, check=True)
        exports += [line for line in text.splitlines() if line.startswith("export ")]


def read_heldout_rewards(run: Path) -> list[float]:
    """Return the held-out rewards of a run folder, in the order of its steps."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["heldout"] for line in lines if "heldout" in line]


def main() -> int:
    if not sys.argv[1:]:
        sys.exit(f"error: name a page to follow\n\n{__doc__}")
    page = Path(sys.argv[1])
    folder = Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp(prefix=f"{page.stem}_"))
    folder.mkdir(parents=True, exist_ok=True)
    follow(page.read_text(encoding="utf-8"), folder)
    rewards = read_heldout_rewards(folder / "runs" / "mine")
    print(f"\nheld-out reward: {rewards[0]:.3f} before, {rewards[-1]:.3f} after; everything is in {folder}")
    return int(rewards[-1] < max(ENOUGH, rewards[0]))


if __name__ == "__main__":
    sys.exit(main())
