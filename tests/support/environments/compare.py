"""Compare the short forms of released templates with their originals, which lie in a folder under any names.

    .venv/bin/python -m support.environments.compare FOLDER

It runs from ``tests``. An original is known by its sha256. Prints each difference, and which originals are missing.
"""

import hashlib
import sys
from pathlib import Path

from support.environments.forms import FORMS
from support.environments.released import RELEASED

MORE = {
    "thinking and a call": [
        FORMS["a tool call"]["messages"][0],
        FORMS["a tool call"]["messages"][1] | {"content": "Let me see.", "reasoning_content": "One and three."},
    ],
    "two results": [
        *FORMS["two calls"]["messages"],
        {"role": "tool", "content": "4", "tool_call_id": "call00000"},
        {"role": "tool", "content": "5", "tool_call_id": "call00001"},
    ],
    "thinking, then a question": [
        *FORMS["`reasoning_content`"]["messages"],
        {"role": "user", "content": " Sure? "},
    ],
}
"""Conversations beyond the forms, in which templates differ: name -> messages."""
_USER = ("<|im_start|>user", "<|user|>", "1 + 3?")
"""What follows the prose that introduces tools, which a short form leaves out."""


def render(tokenizer, template: str, messages: list[dict], tools: list[dict] | None, goes_on: bool) -> str:
    """Render messages; what the template raises is part of what it does."""
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=goes_on, chat_template=template
        )
    except Exception as error:  # the words differ, the refusal does not
        return f"refused, {type(error).__name__}"
    if tools:
        mark = next((mark for mark in _USER if mark in text), "")
        return text.partition(mark)[2] if mark else text
    return text


def main(folder: str) -> int:
    """Compare all that are there, and return the number of differences."""
    originals = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in Path(folder).iterdir()}
    rows = {name: (row.get("messages") or [*row["prompt"], *row["completion"]]) for name, row in FORMS.items()}
    faults = 0
    for name, released in RELEASED.items():
        if released.sha256 not in originals:
            print(f"{name}: no original")
            continue
        original, tokenizer = originals[released.sha256].read_text(), released.make_tokenizer()
        for form, messages in {**rows, **MORE}.items():
            has_calls = any(message.get("tool_calls") for message in messages)
            for tools in (None, FORMS["a tool call"]["tools"]) if has_calls else (None,):
                for goes_on in (False, True):
                    want = render(tokenizer, original, messages, tools, goes_on)
                    ours = render(tokenizer, released.template, messages, tools, goes_on)
                    if want != ours:
                        faults += 1
                        print(f"{name}, {form}, tools {bool(tools)}, goes on {goes_on}:\n  {want!r}\n  {ours!r}")
    print(f"{faults} differences")
    return faults


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1])))
