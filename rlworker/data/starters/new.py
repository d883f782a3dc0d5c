"""``rlworker new``: write a folder with a recipe, ten rows and a reward, for text, images or tools."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Literal

Kind = Literal["text", "images", "tools"]
"""What the rows of a new folder are: questions, questions about images, or questions that a tool helps with."""
_RECIPE, _ROWS = "recipe.py", "train.jsonl"
_COUNT = 10
"""Number of rows."""
_SIDE, _CELL = 56, 14
"""Pixels of an image and of the cells that a square may stand in."""
_COLOURS = {"red": (235, 90, 90), "green": (90, 220, 90), "blue": (100, 130, 250)}


def make_starter(folder: Path, kind: Kind) -> list[Path]:
    """Write a recipe with its reward and ten rows into a new folder, and return the files.

    Raises:
        ValueError: the folder exists; nothing in it is touched.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise ValueError(f"new: {str(folder)!r} is there already, and is not touched; name a new folder") from error
    recipe = files("rlworker.data.starters") / "templates" / f"{kind}.py.txt"
    (folder / _RECIPE).write_text(recipe.read_text("utf-8"))
    rows = {"text": _make_text_rows, "images": _make_image_rows, "tools": _make_tool_rows}[kind](folder)
    (folder / _ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [folder / _RECIPE, folder / _ROWS]


def _make_text_rows(folder: Path) -> list[dict]:
    pairs = [(17 * number + 12, 31 * number + 5) for number in range(_COUNT)]
    return [{"prompt": [_ask(f"What is {a} + {b}?")], "answer": str(a + b)} for a, b in pairs]


def _make_tool_rows(folder: Path) -> list[dict]:
    pairs = [(17 * number + 12, 7 * number + 13) for number in range(_COUNT)]
    return [{"prompt": [_ask(f"What is {a} times {b}?")], "answer": str(a * b)} for a, b in pairs]


def _make_image_rows(folder: Path) -> list[dict]:
    """Draw an image of one to five squares for each row, under ``images/``."""
    from PIL import Image, ImageDraw  # the other kinds need none

    (folder / "images").mkdir()
    rows = []
    for number in range(_COUNT):
        colour, count = list(_COLOURS)[number % len(_COLOURS)], number % 5 + 1
        image = Image.new("RGB", (_SIDE, _SIDE), (30, 30, 30))
        pen = ImageDraw.Draw(image)
        for square in range(count):
            cell = (3 * square + number) % (_SIDE // _CELL) ** 2  # three has no divisor in common with 16
            x, y = cell % (_SIDE // _CELL) * _CELL + 3, cell // (_SIDE // _CELL) * _CELL + 3
            pen.rectangle((x, y, x + 8, y + 8), fill=_COLOURS[colour])
        name = f"images/{number}.png"
        image.save(folder / name)
        content = [{"type": "image"}, {"type": "text", "text": f"How many {colour} squares are there?"}]
        rows.append({"prompt": [_ask(content)], "images": [name], "answer": str(count)})
    return rows


def _ask(content: str | list[dict]) -> dict:
    return {"role": "user", "content": content}
