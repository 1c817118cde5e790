"""Tells a sink, a file for one, of everything that an engine is given and decides: enough to run it again.

Every event is a mapping with `event`, its kind, and `t`, the engine's clock in seconds. Requests are named by their id,
samples and beams other than the first by [id, sample]. What is 0 or empty is left
out.

What the engine was given:
    header    format, paged_jax (version), config (EngineConfig), num_blocks, num_swap_blocks, cache_groups (layers, KV
              heads, head size, window of each), max_model_len, vocab_size, eos_token_ids; the only event without `t`
    arrival   id, arrival_time, prompt (token ids), params or beams (all fields of SamplingParams, BeamSearchParams),
              priority, user, cache_salt, expected_output_len
    abort     id: a request was aborted
    reset     the prefix cache was to be forgotten
    weights   the model has other weights now
    step      step (counts from 1): planning begins
    result    the planned step is done; padded (tokens of padding that were computed besides)
    token     id, n (output tokens before), tokens or, of a beam, top (candidates: token, log-probability); check
    retract   the step's result was lost: an interrupt, for one

What it decided:
    schedule  num_tokens, decodes, chunks (request, first token, number of tokens), forks (samples that begin), idle
              (rows of a static batch that have ended), admitted (request, slot), preempted
    preempt   id, how ("recompute", "swap")
    wait      id of a sample or beam that finds no room for its copy of what it begins with
    allocate  id, first, blocks (per cache group: the block table from entry `first` on), cached (tokens found)
    evict     group, block: a cached block was given up
    copy      group, source, target: a shared block was copied before a write
    swap      id, to ("host", "device"), device_blocks and host_blocks (per cache group)
    beam      id, parent, token: this beam goes on from there
    finish    id, reason, stop (token or string), n (output tokens), held (the stop string was completed by characters
              that were held back until the end), hypotheses (of a beam search: tokens, log-probability, reason)

`check` is a checksum over the request's answers so far, and over its prompt: a replay works it out again.
"""

import zlib
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from paged_jax import __version__
from paged_jax.engine.request import Request
from paged_jax.engine.trace_file import encode
from paged_jax.execution.plan import SchedulerOutput, StepResult
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine

FORMAT = 1
"""Changes whenever a reader of older traces would be misled."""

type Event = dict[str, Any]


class Sink(Protocol):
    """Where events go."""

    def write(self, event: Event) -> None:
        """Take the next one."""
        ...

    def flush(self, *, idle: bool) -> None:
        """Nothing is going on just now; `idle`: nor is anything left to do."""
        ...


def header(engine: "Engine") -> Event:
    """The first event: what the engine is made of."""
    executor = engine.executor
    return {
        "event": "header",
        "format": FORMAT,
        "paged_jax": __version__,
        "config": engine.config.model_dump(mode="json"),
        "num_blocks": executor.num_blocks,
        "num_swap_blocks": executor.num_swap_blocks,
        "cache_groups": [[g.num_layers, g.num_kv_heads, g.head_dim, g.sliding_window] for g in executor.cache_groups],
        "max_model_len": engine.max_model_len,
        "vocab_size": engine.vocab_size,
        "eos_token_ids": sorted(engine.eos_token_ids),
    }


class Recorder:
    """Turns what the engine, its scheduler and its KV cache report into events."""

    def __init__(self, sink: Sink, now: Callable[[], float]) -> None:
        self._sink = sink
        self._now = now
        self._num_steps = 0
        self._checks: dict[Request, int] = {}

    def record(self, event: str, request: Request | None = None, **values: Any) -> None:
        """One event; `request` is whom it happened to."""
        if event == "finish":
            values |= _ending(request)
            self._checks.pop(request, None)
        if "parent" in values:
            values["parent"] = _name(values["parent"])
        if request is not None:
            values = {"id": _name(request), **values}
        kept = {key: value for key, value in values.items() if value or (key == "stop" and value is not None)}
        self._sink.write({"event": event, "t": self._now(), **kept})

    def arrival(self, leader: Request, params: SamplingParams | BeamSearchParams) -> None:
        """A request has been accepted."""
        kind = "beams" if isinstance(params, BeamSearchParams) else "params"
        self.record(
            "arrival",
            leader,
            arrival_time=leader.metrics.arrival_time,
            prompt=leader.prompt_token_ids,
            **{kind: {f.name: getattr(params, f.name) for f in fields(params) if f.init}},
            priority=leader.priority,
            user=leader.user,
            cache_salt=leader.cache_salt,
            expected_output_len=leader.expected_output_len,
        )

    def begin_step(self) -> None:
        """Planning begins."""
        self._num_steps += 1
        self.record("step", step=self._num_steps)

    def schedule(self, plan: SchedulerOutput) -> None:
        """The plan is made."""
        self.record(
            "schedule",
            num_tokens=plan.num_tokens,
            decodes=list(map(_name, plan.decodes)),
            chunks=[[_name(part.request), part.start, part.num_tokens] for part in plan.chunks],
            forks=[_name(fork.child) for fork in plan.forks],
            idle=list(map(_name, plan.idle)),
            admitted=[[_name(request), request.slot] for request in plan.admitted],
            preempted=list(map(_name, plan.preempted)),
        )
        for to, swaps in (("host", plan.swap_outs), ("device", plan.swap_ins)):
            for swap in swaps:
                self.record("swap", swap.request, to=to, device_blocks=swap.device_blocks, host_blocks=swap.host_blocks)
        for group, copies in enumerate(plan.copies):
            for source, target in copies:
                self.record("copy", group=group, source=source, target=target)

    def result(self, plan: SchedulerOutput, result: StepResult) -> None:
        """The step is done, and nothing of it is booked yet."""
        self.record("result", padded=result.num_padded_tokens)
        now, write, checks = self._now(), self._sink.write, self._checks
        rows = [*plan.decodes, *(part.request for part in plan.chunks), *(fork.child for fork in plan.forks)]
        logprobs = result.logprobs or [None] * len(rows)
        for request, tokens, entry in zip(rows, result.token_ids, logprobs, strict=True):
            if not tokens or request.is_finished:
                continue
            key, answer = ("tokens", tokens) if request.beam_search is None else ("top", entry.top)
            before = checks.get(request) or zlib.crc32(encode(request.prompt_token_ids).encode())
            check = checks[request] = zlib.crc32(encode(answer).encode(), before)
            n = request.num_output_tokens
            place = {"event": "token", "t": now, "id": _name(request)}
            write({**place, "n": n, key: answer, "check": check} if n else {**place, key: answer, "check": check})

    def flush(self, *, idle: bool) -> None:
        """A good moment to write to the disk; `idle`: nothing is left to do."""
        self._sink.flush(idle=idle)


def _name(request: Request) -> str | list[str | int]:
    return [request.request_id, request.sample_index] if request.sample_index else request.request_id


def _ending(request: Request) -> Event:
    search = request.beam_search
    best = search.best() if search is not None and search.is_finished and not request.sample_index else ()
    return {
        "reason": request.finish_reason,
        "stop": request.stop_reason,
        "n": request.num_output_tokens,
        "hypotheses": [[h.token_ids, h.cumulative_logprob, h.finish_reason] for h in best],
    }
