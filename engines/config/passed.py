"""Settings that are passed on to Megatron and to vLLM, in one place for both."""

from typing import Literal

from engines.validation import PassThrough


def check_passed(library: Literal["megatron", "vllm"], given: PassThrough) -> None:
    """Raise ValueError where the library has no such setting, or the engine sets it itself; nothing given is right."""
    if given:
        from engines.pass_through import check_pass_through  # it reads the library's source

        check_pass_through(library, given)
