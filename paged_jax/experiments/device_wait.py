"""How long a real engine's host waits for its device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine, StepHandle
    from paged_jax.execution.plan import SchedulerOutput, StepResult


class DeviceWait:
    """Adds up the time in which the host waits for the results of steps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def result_of(self, handle: "StepHandle") -> "StepResult":
        """Wait for the step's tokens."""
        began = time.perf_counter()
        result = handle.result()
        self.seconds += time.perf_counter() - began
        return result


class _TimedHandle:
    def __init__(self, handle: "StepHandle", wait: DeviceWait) -> None:
        self._handle, self._wait = handle, wait

    def result(self) -> "StepResult":
        return self._wait.result_of(self._handle)


@contextmanager
def timed_waits(engine: "Engine") -> Iterator[DeviceWait]:
    """Measure the waiting of all steps inside of the block: the executor's `submit` is another one meanwhile."""
    executor, wait = engine.executor, DeviceWait()
    submit = executor.submit

    def timed_submit(plan: "SchedulerOutput") -> _TimedHandle:
        return _TimedHandle(submit(plan), wait)

    executor.submit = timed_submit  # type: ignore[method-assign]
    try:
        yield wait
    finally:
        executor.submit = submit  # type: ignore[method-assign]
