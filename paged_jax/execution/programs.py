"""Programs compiled ahead of their first use, or at it: nothing is ever compiled unseen."""

import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax


class Programs[Key: Hashable]:
    """One compiled program per key. It accepts the shapes it was lowered for and no others."""

    def __init__(self, lower: Callable[[Key], jax.stages.Lowered]) -> None:
        self._lower = lower
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self.compile_seconds = 0.0
        """Wall time that compiling took."""

    def __len__(self) -> int:
        return len(self._compiled)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._compiled)

    def __getitem__(self, key: Key) -> jax.stages.Compiled:
        """The key's program, compiled now if it is missing."""
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = self._lower(key).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key]

    def compile(self, keys: Iterable[Key], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing of `keys`, several at a time; `progress(done, total)` is told after each."""
        missing = [key for key in keys if key not in self._compiled]
        start = time.perf_counter()
        lowered = {key: self._lower(key) for key in missing}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {pool.submit(program.compile): key for key, program in lowered.items()}
            for done, future in enumerate(as_completed(futures)):
                self._compiled[futures[future]] = future.result()
                if progress is not None:
                    progress(done + 1, len(missing))
        self.compile_seconds += time.perf_counter() - start
