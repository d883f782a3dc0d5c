"""A taskset of ``verifiers`` that needs no data, for a small run: sums of two digits.

``verifiers_env.py --smoke`` has it played, in the Python that has the package.
"""

from collections.abc import Iterator

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  in another Python


class SumData(vf.TaskData):
    """A question with its answer."""

    answer: str = ""


class Sum(vf.Task[SumData]):
    """A sum, rewarded where it is right, and a little where digits are written at all."""

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == self.data.answer)

    @vf.reward(weight=0.1)
    async def has_digits(self, trace: vf.Trace) -> float:
        text = trace.assistant_messages[-1].content or ""
        return sum(letter.isdigit() for letter in text) / max(1, len(text))


class Sums(vf.Taskset[Sum]):
    """The sums of two numbers from 0 to 4."""

    def load(self) -> Iterator[Sum]:
        for number in range(25):
            a, b = divmod(number, 5)
            yield Sum(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


__all__ = ["Sums"]
