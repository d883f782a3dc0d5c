"""Images come in the messages of calls: ids and images are those of an environment that shows the same."""

import base64
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.environments.agents import PATIENT, connect, run
from support.environments.chat import GuardedTokenizer
from support.environments.rows import read_shown
from support.environments.runners import EOS

from engines.images.decoding import decode
from engines.models.spec import ModelSpec
from recipes.common.addition import make_tokenizer
from rlworker.checks.tiny.models import IMAGE_TOKENS, make_tiny_vlm
from rlworker.config.sections import DataConfig
from rlworker.data.images import build_image_reader
from rlworker.data.rows import load_tokenizer
from rlworker.environments import Episode
from rlworker.environments.codec import Codec, using_codec

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token if m.role == 'assistant' else ';' }}{% endfor %}"
    "assistant:"
)
SIZES = {"first": (84, 56), "second": (28, 56), "other": (56, 56)}
"""Name of each image -> its pixels."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A row with an image, the codec of a model that sees images, and the files of images by name."""
    folder = tmp_path_factory.mktemp("shown")
    tokenizer = make_tokenizer(TEMPLATE, IMAGE_TOKENS)
    model = ModelSpec.from_folder(make_tiny_vlm(folder / "model", "qwen2_5_vl", tokenizer, 128))
    for number, (name, (width, height)) in enumerate(SIZES.items()):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    data = DataConfig(max_prompt_tokens=64)
    asked = [{"role": "user", "content": [{"type": "text", "text": "See "}, {"type": "image"}]}]
    (row,) = read_shown(model, data, {"prompt": asked, "answer": "", "images": ["first.png"]}, folder=folder)
    guarded, reader = GuardedTokenizer(load_tokenizer(model.folder)), build_image_reader(model, str(folder), 64)
    return row, Codec(guarded, (EOS,), reader, data, model.vocab), {name: folder / f"{name}.png" for name in SIZES}


def show(file: Path) -> dict:
    """A message that shows an image, as OpenAI's API has it."""
    url = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    parts = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": url, "detail": "high"}}]
    return {"role": "user", "content": parts}


def play(shown, agent) -> list[list[tuple]]:
    """Turn, ids and bytes of the images of each segment of an episode, sequence by sequence."""
    row, codec, _ = shown

    async def environment(policy, row):
        endpoint = policy.endpoint(row)
        async with connect(endpoint) as client:
            await agent(client.chat.completions.create)
        return endpoint.episode

    return tell(run(environment, [row], limits=PATIENT, codec=codec)[0])


def tell(record) -> list[list[tuple]]:
    assert record.failure is None, record.failure
    return [
        [
            (each.turn, [*map(int, each.token_ids)], [Path(image.path).read_bytes() for image in each.images])
            for each in segments
        ]
        for segments in record.sequences
    ]


def test_ids_and_images_are_those_of_the_environment_that_shows_the_same(shown):
    row, codec, files = shown

    async def agent(create):
        messages = [show(files["first"])]
        messages += [(await create(model="", messages=messages)).choices[0].message.model_dump()]
        messages += [show(files["second"])]
        messages += [(await create(model="", messages=messages)).choices[0].message.model_dump()]
        await create(model="", messages=[*messages[2:], show(files["other"])])  # the first exchange is dropped

    async def environment(policy, row):
        episode, (asked,) = Episode(row), row.messages
        await policy.sample(episode)
        episode.observe(asked, [files["second"]])
        sample = await policy.sample(episode)
        said = {"role": "assistant", "content": codec.decode_samples([sample.token_ids])[0]}
        sampled = {1: sample.token_ids.tolist()}
        episode.fork([asked, said, asked], [files["second"], files["other"]], sampled=sampled)
        await policy.sample(episode)
        return episode

    found = play(shown, agent)
    assert found == tell(run(environment, [row], limits=PATIENT, codec=codec)[0])
    assert [[turn for turn, _, _ in each] for each in found] == [[-1, 0, -1, 1], [-1, 2]]
    first, second, other = (file.read_bytes() for file in files.values())
    assert [images for each in found for _, _, images in each] == [[first], [], [second], [], [second, other], []]
    vision = codec.image_reader.vision
    counts = [ids.count(vision.image_token) for _, ids, _ in found[0]]
    assert counts == [6, 0, 2, 0], "a token for each 28 x 28 pixels"


def test_an_image_that_is_not_the_rows_takes_its_place(shown):
    row, _, files = shown

    async def agent(create):
        await create(model="", messages=[show(files["other"])])

    ((prompt, _),) = play(shown, agent)
    assert prompt[2] == [files["other"].read_bytes()] and prompt[1] != [*row.prompt_ids]


def test_an_image_is_kept_as_it_was_observed(shown, tmp_path):
    """An environment saves each screen to the same file."""
    row, codec, files = shown
    with using_codec(codec):
        episode = Episode(row)
        for name in ("first", "second"):
            (tmp_path / "screen.png").write_bytes(files[name].read_bytes())
            episode.observe("<image>", [str(tmp_path / "screen.png")])
    images = [image for piece in episode.sequences[0][1:] for image in piece.images]
    assert [image.size for image in images] == [decode(image).size for image in images] == [SIZES["first"], (28, 56)]
    with using_codec(codec), pytest.raises(ValueError, match=r"observe, image 1: '.*none.png' cannot be read: No such"):
        episode.observe("<image><image>", [files["first"], tmp_path / "none.png"])


def test_images_of_pillow_are_seen_as_a_viewer_shows_them(shown, tmp_path):
    """Turned as a camera was held, and of colours that a PNG cannot have; what cannot be shown is refused."""
    row, codec, _ = shown
    turned, mixed = Image.Exif(), Image.new("CMYK", (56, 28), (0, 255, 255, 0))
    turned[0x0112] = 6
    Image.new("RGB", (56, 28)).save(tmp_path / "held.jpg", exif=turned)
    with using_codec(codec), Image.open(tmp_path / "held.jpg") as held:
        episode = Episode(row)
        episode.observe("<image><image>", [held, mixed])
        with pytest.raises(ValueError, match=r"observe, image 0: the image has more than 8 bits of grey \(I;16\)"):
            episode.observe("<image>", [Image.new("I;16", (56, 28))])
    images = episode.sequences[0][1].images
    assert [image.size for image in images] == [(28, 56), (56, 28)]
    assert decode(images[1]).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("url", ["https://example.org/a.png", "data:image/png;base64,AAAA", "data:image/png;base64,A"])
def test_what_is_no_image_is_refused_and_the_episode_goes_on(shown, url):
    heard = []

    async def agent(create):
        from openai import BadRequestError

        message = show(shown[2]["first"])
        wrong = [*message["content"][:1], {"type": "image_url", "image_url": {"url": url}}]
        try:
            await create(model="", messages=[message | {"content": wrong}])
        except BadRequestError as error:
            heard.append((error.param, error.message))
        await create(model="", messages=[message])

    (segments,) = play(shown, agent)
    ((param, text),) = heard
    assert param == "messages" and "image" in text
    assert [turn for turn, _, _ in segments] == [-1, 0]


def test_a_part_may_hold_its_image_as_a_tools_result_does(shown):
    """Ids and images are those of the same messages with the images beside them; images in both ways are refused."""
    row, codec, files = shown
    pixels = {name: file.read_bytes() for name, file in files.items()}
    (asked,) = row.messages
    held = {"role": "tool", "content": [{"type": "image", "image": pixels["other"]}, {"type": "text", "text": "so"}]}
    bare = {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "so"}]}

    def make(*messages, images=()):
        async def environment(policy, row):
            episode = Episode(row, [asked, *messages[:1]], images=[pixels["first"], *images[:1]])
            await policy.sample(episode)
            episode.observe(messages, images)
            await policy.sample(episode)
            return episode

        return environment

    def make_held():
        async def environment(policy, row):
            first = {**asked, "content": [*asked["content"][:1], {"type": "image", "image": pixels["first"]}]}
            episode = Episode(row, [first, held])
            await policy.sample(episode)
            episode.observe([held])
            await policy.sample(episode)
            return episode

        return environment

    beside = run(make(bare, images=[pixels["other"]]), [row], limits=PATIENT, codec=codec)[0]
    within = run(make_held(), [row], limits=PATIENT, codec=codec)[0]
    assert tell(within) == tell(beside) and tell(within)[0][2][2] == [pixels["other"]]
    mixed = run(make(held, images=[pixels["other"]]), [row], limits=PATIENT, codec=codec)[0]
    assert mixed.failure and "got 1 images in parts of messages and 2 beside them" in mixed.failure[1]
