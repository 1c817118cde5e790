"""What all kinds of workloads have in common, and how their drawn prompts become requests."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from paged_jax.engine.engine import Arrival
from paged_jax.experiments.arrival_times import ArrivalProcess, Start
from paged_jax.experiments.lengths import LAWS, Count, Lengths, with_law
from paged_jax.sampling.params import BeamSearchParams, SamplingParams


class WorkloadSpec(ArrivalProcess):
    """The keys that every kind of workload has."""

    n: Count = 1
    """Samples of each prompt; more than 1 are drawn at temperature 1, with a seed for each request."""
    beam_width: Count | None = None
    """Search each prompt's continuation with so many beams; refused together with n."""
    users: Count | None = None
    """Users "0", "1", ..., of which each request has one: user k with probability proportional to 1 / (k + 1) (Zipf's
    law), so that a few ask for most; unset, all requests are of one user."""
    priorities: Annotated[int, Field(ge=2)] | None = None
    """Levels of priority, 0 (most urgent) to priorities - 1, drawn uniformly; unset, all are equal."""
    cache_salts: bool = False
    """Whether cached prefixes are shared only between requests of the same user."""

    @model_validator(mode="before")
    @classmethod
    def _name_laws(cls, values: Any) -> Any:
        return cls.with_laws(values) if isinstance(values, Mapping) else values

    @classmethod
    def with_laws(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Plain values in which lengths that name no law have the kind's, where that is one, else lognormal."""
        law = values["kind"] if values.get("kind") in LAWS else "lognormal"
        own = [name for name, field in cls.model_fields.items() if field.annotation in (Lengths, Lengths | None)]
        return {**values, **{name: with_law(values[name], law) for name in own if name in values}}

    @model_validator(mode="after")
    def _check_requests(self) -> Self:
        if self.cache_salts and self.users is None:
            raise ValueError("cache_salts keeps the prefixes of users apart, and there is one user: set users, too")
        if self.beam_width is not None and self.n > 1:
            raise ValueError(f"n ({self.n}) samples and beam_width ({self.beam_width}) exclude each other: set one")
        return self

    @property
    def width(self) -> int:
        """Samples or beams of a prompt, which run at once."""
        return self.beam_width or self.n


class Streams(NamedTuple):
    """Random numbers, a stream for each purpose, so that one setting changes only what it decides."""

    contents: np.random.Generator
    """Token ids."""
    lengths: np.random.Generator
    gaps: np.random.Generator
    """Times between arrivals."""
    owners: np.random.Generator
    """Users."""
    levels: np.random.Generator
    """Priorities."""
    samples: np.random.Generator
    """Sampling seeds."""
    structure: np.random.Generator
    """Which prefix, how many examples or turns."""

    @classmethod
    def of(cls, seed: int) -> "Streams":
        """The streams of a trial's seed."""
        return cls(*(np.random.default_rng([seed, i]) for i in range(len(cls._fields))))


def as_arrivals(
    spec: WorkloadSpec,
    seed: int,
    streams: Streams,
    prompts: Sequence[tuple[int, ...]],
    outputs: Sequence[int],
    begin: Sequence[Start],
    *,
    seeds: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
) -> tuple[Arrival, ...]:
    """Requests with these prompts and output lengths; what else the spec says of them is drawn here.

    All go on after end-of-sequence. `begin` tells for each request when it arrives, and by number which request, an
    earlier one, it waits for. `seeds` are sampling seeds, for kinds that must know them; without, requests have one
    only where they are sampled. `owners` numbers the conversation that each request belongs to, whose user and priority
    it has; without, each has its own.
    """
    count = len(prompts)
    owners = range(count) if owners is None else owners
    num_owners = max(owners, default=-1) + 1
    users = _users(spec.users, num_owners, streams.owners)
    levels = streams.levels.integers(spec.priorities or 1, size=num_owners).tolist()
    if seeds is None and spec.n > 1:
        seeds = sampling_seeds(count, streams)
    ids = [f"seed{seed}-{i}" for i in range(count)]
    return tuple(
        Arrival(
            time=begin[i].time,
            prompt_token_ids=prompts[i],
            params=_params(spec, outputs[i], None if seeds is None else seeds[i]),
            request_id=ids[i],
            priority=levels[owners[i]],
            user=users[owners[i]],
            cache_salt=users[owners[i]] if spec.cache_salts else "",
            expected_output_len=outputs[i],
            after=None if (waits_for := begin[i].after) is None else ids[waits_for],
        )
        for i in range(count)
    )


def sampling_seeds(count: int, streams: Streams) -> list[int]:
    """A sampling seed for each request."""
    return streams.samples.integers(2**32, size=count).tolist()


def _params(spec: WorkloadSpec, max_tokens: int, seed: int | None) -> SamplingParams | BeamSearchParams:
    if spec.beam_width is not None:
        return BeamSearchParams(beam_width=spec.beam_width, max_tokens=max_tokens, ignore_eos=True)
    temperature = 1.0 if spec.n > 1 else 0.0
    return SamplingParams(n=spec.n, temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def _users(num_users: int | None, count: int, rng: np.random.Generator) -> list[str]:
    if num_users is None:
        return [""] * count
    shares = 1 / np.arange(1, num_users + 1)
    return [str(user) for user in rng.choice(num_users, size=count, p=shares / shares.sum())]
