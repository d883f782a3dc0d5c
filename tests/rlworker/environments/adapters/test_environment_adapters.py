"""What adapters read of other packages' values, without a server or a game."""

import base64
import json

import pytest

from rlworker.data.rows import Row
from rlworker.environments.adapters.gymnasium import read_seed
from rlworker.environments.adapters.mcp import read_result
from rlworker.environments.tools.results import ToolContent

PIXELS = b"the bytes of an image"


def test_a_seed_that_a_table_filled_up_is_none():
    """Null, and NaN where pandas made floats of whole numbers: the row's own seed, as without the field."""
    own = read_seed(Row("play", (1,), "", {}))
    assert (
        own
        == read_seed(Row("play", (1,), "", {"seed": None}))
        == read_seed(Row("play", (1,), "", {"seed": float("nan")}))
    )
    assert own != read_seed(Row("play on", (1,), "", {}))
    assert [read_seed(Row("play", (1,), "", {"seed": seed})) for seed in (0, 7, 7.0, "7")] == [0, 7, 7, 7]
    for seed in ("one", 0.5, float("inf"), [1]):
        with pytest.raises(ValueError, match=r"the row of prompt 'play' has seed .*, expected a whole number"):
            read_seed(Row("play", (1,), "", {"seed": seed}))


@pytest.fixture(scope="module")
def parts():
    """A part of each kind that the protocol has."""
    from mcp import types

    data = base64.b64encode(PIXELS).decode()
    texts = types.TextResourceContents(uri="notes://1", mime_type="text/plain", text="a note")
    blob = types.BlobResourceContents(uri="files://1.pdf", mime_type="application/pdf", blob=data)
    photo = types.BlobResourceContents(uri="files://1.png", mime_type="image/png", blob=data)
    return {
        "text": types.TextContent(type="text", text="said"),
        "image": types.ImageContent(type="image", data=data, mime_type="image/png"),
        "audio": types.AudioContent(type="audio", data=data, mime_type="audio/wav"),
        "note": types.EmbeddedResource(type="resource", resource=texts),
        "blob": types.EmbeddedResource(type="resource", resource=blob),
        "photo": types.EmbeddedResource(type="resource", resource=photo),
        "link": types.ResourceLink(type="resource_link", name="page", uri="pages://2", mime_type="text/html"),
    }


def read(parts, *names, structured=None, sees=False):
    from mcp import types

    result = types.CallToolResult(content=[parts[name] for name in names], structured_content=structured)
    return read_result(result, sees)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["text"], "said"),
        (["text", "note", "text"], "said\na note\nsaid"),
        (["image"], "[image: image/png]"),
        (["audio"], "[audio: audio/wav]"),
        (["blob"], "[resource: files://1.pdf application/pdf]"),
        (["photo"], "[resource: files://1.png image/png]"),
        (["link"], "[resource_link: page pages://2 text/html]"),
        (["text", "audio"], "said\n[audio: audio/wav]"),
        ([], "(no content)"),
    ],
)
def test_every_part_of_a_result_reaches_the_model_as_text_or_a_word(parts, names, expected):
    assert read(parts, *names) == expected


def test_structured_content_is_json_where_there_is_no_text(parts):
    value = {"degrees": 21.5, "place": "Zürich"}
    assert json.loads(read(parts, structured=value)) == value and "Zürich" in read(parts, structured=value)
    assert read(parts, "text", structured=value) == "said", "the protocol has it as text beside it"
    assert read(parts, "audio", structured=[1]) == "[1]\n[audio: audio/wav]"
    assert read(parts, structured=0) == "0"


def test_images_are_shown_to_a_model_that_sees(parts):
    shown = read(parts, "text", "image", "photo", "audio", sees=True)
    assert isinstance(shown, ToolContent)
    assert [part["type"] for part in shown.parts] == ["text", "image", "image", "text"]
    assert shown.parts[1]["image"] == shown.parts[2]["image"] == PIXELS
    assert read(parts, "text", sees=True) == "said"
