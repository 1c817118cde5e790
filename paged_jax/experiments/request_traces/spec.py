"""What an experiment says about a request trace."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paged_jax.experiments.arrival_times import ArrivalProcess
from paged_jax.experiments.lengths import Count, Lengths, with_law
from paged_jax.experiments.request_traces.timestamps import TimeUnit
from paged_jax.experiments.workload_spec import WorkloadSpec

TIMED = ("azure", "mooncake", "burstgpt")
"""Formats whose files say when requests arrive."""
TEXTS = ("sharegpt", "prompts")
"""Formats whose files have texts, whose lengths only a tokenizer can tell."""

_TIME_FIELDS = ("time_unit", "time_scale", "start_s", "end_s")


class StandIn(ArrivalProcess):
    """Random requests for a machine where the trace file is not: lengths are lognormal unless they name a law."""

    num_requests: Count
    prompt: Lengths
    output: Lengths

    @model_validator(mode="before")
    @classmethod
    def _name_laws(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {k: with_law(v, "lognormal") if k in ("prompt", "output") else v for k, v in values.items()}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_clients is not None:
            raise ValueError(
                "stand_in.num_clients would take the place of a trace's times only while the file is missing: set "
                "num_clients of the workload, or stand_in.request_rate"
            )
        return self


class TraceWorkload(WorkloadSpec):
    """Requests of a trace file: its lengths, its times or an arrival process; its texts, shared blocks, or random ids.

    Rows with an empty prompt or no output are left out, and counted in the notes. Times count from the first request
    that is left. `request_rate` or `num_clients` replace the times of the file.
    """

    kind: Literal["trace"]
    format: Literal["azure", "mooncake", "burstgpt", "lengths", "sharegpt", "prompts"]
    """Where the file comes from; see the file of that name in `request_traces/`."""
    file: str
    """Path, from the current directory."""
    max_requests: Count | None = None
    """The first so many of the requests that are left after all that follows; unset, all."""
    shuffle: bool = False
    """Whether the seed draws which requests are taken, and without times their order; off, all seeds have the same
    lengths in the same order."""
    max_total_tokens: Annotated[int, Field(ge=2)] | None = None
    """Requests with more tokens, prompt and output together, are left out."""
    max_prompt_len: Count | None = None
    """Requests with longer prompts are left out."""
    min_len: Count | None = None
    """Requests whose prompt or output has fewer tokens are left out; unset, 1."""
    start_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Seconds after the file's first request (before scaling) from which on requests are taken."""
    end_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds after the file's first request (before scaling) before which requests are taken."""
    time_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Factor on the times between requests: 2 is twice as slow; unset, 1."""
    time_unit: TimeUnit | None = None
    """Of the file's times; unset, that of the format: ms for mooncake, s for the others. Dates have none."""
    output: Lengths | None = None
    """Output tokens, for format `prompts` only, where it takes the place of answers; needed if there are none."""
    stand_in: StandIn | None = None
    """What to run where the file is missing; unset, that is an error."""

    @model_validator(mode="after")
    def _check_trace(self) -> Self:
        if self.format not in TIMED:
            for name in _TIME_FIELDS:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} has no effect with format {self.format!r}, which has no times: leave it out"
                    )
        if self.time_scale is not None and not self.keeps_times:
            raise ValueError("time_scale has no effect with request_rate or num_clients: leave it out")
        if self.output is not None and self.format != "prompts":
            raise ValueError(
                f"output has no effect with format {self.format!r}, which has output lengths: leave it out"
            )
        if self.shuffle and self.keeps_times and self.max_requests is None:
            raise ValueError(
                "shuffle has no effect on all the requests of a trace at their own times: set max_requests, or replace "
                "the times with request_rate or num_clients"
            )
        if self.start_s is not None and self.end_s is not None and self.start_s >= self.end_s:
            raise ValueError(f"start_s ({self.start_s:g}) must be before end_s ({self.end_s:g})")
        if self.max_total_tokens is not None and self.max_total_tokens < 2 * (self.min_len or 1):
            raise ValueError(
                f"max_total_tokens ({self.max_total_tokens}) leaves no room for two times min_len: raise it"
            )
        if self.max_prompt_len is not None and self.max_prompt_len < (self.min_len or 1):
            raise ValueError(f"max_prompt_len ({self.max_prompt_len}) is less than min_len ({self.min_len}): raise it")
        if self.stand_in is not None and self.stand_in.request_rate is not None and not self.keeps_times:
            raise ValueError(
                "stand_in.request_rate has no effect, since the times do not come from the file: set request_rate of "
                "the workload only"
            )
        return self

    @property
    def keeps_times(self) -> bool:
        """Whether requests arrive when the file says."""
        return self.format in TIMED and self.request_rate is None and self.num_clients is None
