"""Rows whose images or videos cannot be used: refused together, or left out and counted."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlworker.base.terminal import LOGGER
from rlworker.config.sections import DataConfig

_SHOWN = 10
"""Number of bad rows that a message lists."""


class BadImage(ValueError):
    """An image or video of a row cannot be used: the message has the row and the remedy."""


@contextmanager
def naming_bad_images() -> Iterator[None]:
    """Raise an error of reading an image as ``BadImage``."""
    try:
        yield
    except ValueError as error:
        raise BadImage(str(error)) from None


class BadRows:
    """The rows of a source whose images cannot be used.

    Args:
        path: the source. data: settings of the data.
    """

    def __init__(self, path: str, data: DataConfig):
        self.path, self.data = path, data
        self._messages: list[str] = []

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, error: BadImage) -> None:
        """Record a row by its first bad image."""
        self._messages.append(str(error))

    def settle(self, good: int) -> None:
        """Refuse the bad rows of a source that has been read whole, or say that they are left out.

        Args:
            good: number of the other rows.

        Raises:
            ValueError: there are bad rows, and they are not to be skipped or are all that there is.
        """
        count = len(self)
        if not count:
            return
        if count == 1 and not self.data.skip_bad_images:
            raise ValueError(f"{self._messages[0]}; or leave the row out by --data.skip-bad-images")
        shown = "".join(f"\n  {message}" for message in self._messages[:_SHOWN])
        shown += f"\n  and {count - _SHOWN} more" if count > _SHOWN else ""
        if not self.data.skip_bad_images or not good:
            remedy = "correct them" if self.data.skip_bad_images else "correct them, or set --data.skip-bad-images"
            raise ValueError(f"data: {self.path}: {count} of {count + good} rows have bad images; {remedy}:{shown}")
        LOGGER.warning(f"data: {self.path}: {count} of {count + good} rows are left out for bad images:{shown}")
