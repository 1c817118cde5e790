"""When requests arrive: all at once, by a Poisson or a gamma process, or as clients get their answers (closed loop)."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from paged_jax.config import StrictModel
from paged_jax.experiments.lengths import Count


class ArrivalProcess(StrictModel):
    """The keys of a workload that say when its requests arrive; without any, all arrive at once."""

    request_rate: Annotated[float, Field(gt=0)] | None = None
    """Requests per second of a Poisson process, or of a gamma process with `burstiness`; unset, all arrive at once."""
    burstiness: Annotated[float, Field(gt=0)] | None = None
    """Shape of gamma-distributed gaps of the same mean, as in vLLM's benchmarks: their coefficient of variation is 1 /
    sqrt(burstiness), so that less than 1 is burstier than a Poisson process, and more is more even."""
    num_clients: Count | None = None
    """A closed loop: each of so many clients has one request at a time, and asks again when it is done."""
    think_time_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds between a client's answer and its next request; unset, 0."""

    @model_validator(mode="after")
    def _check_arrivals(self) -> Self:
        if self.burstiness is not None and self.request_rate is None:
            raise ValueError("burstiness has no effect without request_rate: set it, or leave burstiness out")
        if self.num_clients is not None and self.request_rate is not None:
            raise ValueError(
                "num_clients is a closed loop, where clients wait for answers, and request_rate an open one: "
                "leave one of them out"
            )
        if self.think_time_s is not None and not self._thinks:
            raise ValueError("think_time_s has no effect without num_clients: set it, or leave think_time_s out")
        return self

    @property
    def _thinks(self) -> bool:
        """Whether any request waits for another one."""
        return self.num_clients is not None


class Start(NamedTuple):
    """When one request, or one conversation, begins."""

    time: float
    """Seconds since the workload's start, or since the end of `after`."""
    after: int | None = None
    """The one that must have ended, by its number."""


def starts(spec: ArrivalProcess, count: int, rng: np.random.Generator) -> list[Start]:
    """Starts of `count` requests or conversations, the first of which arrives at 0.

    In a closed loop client c of C has those numbered c, c + C, c + 2C, ...: who asks what does not depend on who is
    answered first, so that every setting serves the same clients.
    """
    if spec.num_clients is not None:
        clients, pause = spec.num_clients, spec.think_time_s or 0.0
        return [Start(0.0) if i < clients else Start(pause, i - clients) for i in range(count)]
    return [Start(time) for time in _open_loop(spec, count, rng)]


def _open_loop(spec: ArrivalProcess, count: int, rng: np.random.Generator) -> Sequence[float]:
    times = np.zeros(count)
    if spec.request_rate is not None:
        shape = 1.0 if spec.burstiness is None else spec.burstiness
        # NumPy draws a gamma of shape 1 as the exponential that it is, from the same random bits
        times[1:] = np.cumsum(rng.gamma(shape, 1 / (spec.request_rate * shape), count - 1))
    return times.tolist()
