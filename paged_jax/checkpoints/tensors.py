"""A checkpoint's weights as a mapping that reads nothing until it is asked."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np


class LazyTensor(NamedTuple):
    """One tensor that has not been read yet: its shape, and the function that reads it."""

    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]


class LazyTensors(Mapping[str, np.ndarray]):
    """Hugging Face tensor names -> arrays.

    Each look-up reads the array anew, so that memory need not hold more than one at a time.
    """

    def __init__(self, entries: Mapping[str, LazyTensor]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._entries[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # the mixin's own would read the tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it. Raises KeyError for a name that is not there."""
        return self._entries[name].shape
