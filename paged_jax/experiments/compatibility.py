"""Whether an engine's settings and a workload go together, and have a place in an experiment."""

from collections.abc import Iterable, Sequence
from typing import Any

from paged_jax.config import POLICIES, EngineConfig, check_real
from paged_jax.experiments.workloads import Workload, longest_request

_WORKLOAD_OF = {
    ("scheduling_policy", "priority"): "priorities",
    ("victim_policy", "lowest_priority"): "priorities",
    ("scheduling_policy", "fair"): "users",
}
"""Policies and the field of the workload without which all requests are alike to them."""


DEVICE_KEYS = ("model", "hardware")
"""What may be swept besides the engine and the workload, if nothing is loaded or run."""


def check_executor(executor: str, hardware: str | None, repeats: int) -> None:
    """Raise ValueError for a device that is lacking, or has no effect, and for repeats that repeat nothing."""
    if executor == "simulated" and hardware is None:
        raise ValueError("executor 'simulated' needs hardware, such as a100-40gb: see paged_jax/catalog/hardware/")
    if executor != "simulated" and hardware is not None:
        raise ValueError(
            f"hardware ({hardware}) has no effect with executor {executor!r}, which runs on this machine: leave it "
            "out, or set executor: simulated"
        )
    if executor == "simulated" and repeats != 1:
        raise ValueError(f"repeats ({repeats}) of a simulated trial are all the same: leave it out, or set more seeds")


def check_seeds(executor: str, seeds: Sequence[int], workload: Workload) -> None:
    """Raise ValueError for seeds that all make the same trial: in virtual time only lengths and times matter."""
    if (
        executor == "simulated"
        and len(seeds) > 1
        and workload.kind == "trace"
        and not (workload.shuffle or workload.request_rate or workload.users or workload.priorities)
        and workload.width == 1
    ):
        raise ValueError(
            f"seeds {list(seeds)} are all the same for a trace in its own order at its own times: give one, or set "
            "workload.shuffle and workload.max_requests, so that each takes other requests"
        )


def check_engine(executor: Any, engine: EngineConfig, workload: Workload) -> None:
    """Raise ValueError for a setting of the engine that has no effect with the executor."""
    if executor == "simulated" and engine.seed and workload.beam_width is None:
        raise ValueError("engine.seed has no effect on a simulated device, but for beams: leave it out, and set seeds")
    if executor == "simulated":
        from paged_jax.simulation.engines import check_simulated  # timed experiments need nothing of it

        check_simulated(engine)
    else:
        check_real(engine)


def check_together(engine: EngineConfig, workload: Workload) -> None:
    """Raise ValueError for an engine that cannot serve the workload, or that no experiment can have."""
    longest, limit = longest_request(workload), engine.max_model_len
    if longest is not None and limit is not None and longest > limit:
        raise ValueError(
            f"the workload can ask for requests of {longest} tokens, more than engine.max_model_len "
            f"({limit}): lower the max of its lengths or raise engine.max_model_len"
        )
    if workload.n > engine.max_num_seqs:
        raise ValueError(
            f"workload.n ({workload.n}) samples of a prompt run at once, more than engine.max_num_seqs "
            f"({engine.max_num_seqs}): lower the one or raise the other"
        )
    if workload.beam_width is not None:
        _check_beams(engine, workload.beam_width)
    for (field, policy), wanted in _WORKLOAD_OF.items():
        if getattr(engine, field) == policy and getattr(workload, wanted) is None:
            raise ValueError(f"engine.{field} {policy!r} has no effect without workload.{wanted}: set it")
    if engine.trace_file is not None:
        raise ValueError(
            "engine.trace_file is one file, and an experiment runs many trials: leave it out, record a run with "
            "`paged-jax generate --trace-file FILE`, and try other settings on it with `paged-jax replay FILE`"
        )
    if engine.eviction == "belady":
        raise ValueError(
            "engine.eviction 'belady' must know the future, and a trial does not: record a run with "
            "`paged-jax generate --trace-file FILE` under another policy, then `paged-jax replay FILE eviction=belady`"
        )


def check_has_effect(settings: Iterable[tuple[EngineConfig, Workload]]) -> None:
    """Raise ValueError if workloads have users or priorities, and none of the settings to be compared looks at them.

    A policy of one's own may.
    """
    settings = list(settings)
    for field in ("users", "priorities"):
        readers = [(key, policy) for (key, policy), wanted in _WORKLOAD_OF.items() if wanted == field]
        salts = field == "users"
        is_set = any(getattr(workload, field) is not None for _, workload in settings)
        if is_set and not any(_reads(engine, readers) or (salts and work.cache_salts) for engine, work in settings):
            known = [f"engine.{key} {policy!r}" for key, policy in readers] + ["workload.cache_salts"] * salts
            raise ValueError(f"workload.{field} has no effect without {' or '.join(known)}: leave it out")


def _reads(engine: EngineConfig, readers: Sequence[tuple[str, str]]) -> bool:
    chosen = [getattr(engine, key) for key in POLICIES]
    return any(getattr(engine, key) == policy for key, policy in readers) or any(":" in (name or "") for name in chosen)


def _check_beams(engine: EngineConfig, beam_width: int) -> None:
    if beam_width > engine.max_num_seqs:
        raise ValueError(
            f"workload.beam_width ({beam_width}) beams of a prompt run at once, more than engine.max_num_seqs "
            f"({engine.max_num_seqs}): lower the one or raise the other"
        )
    # no token ends a beam, since requests of workloads go on after end-of-sequence: then twice the width is looked at
    if 2 * beam_width > engine.max_logprobs:
        raise ValueError(
            f"workload.beam_width ({beam_width}) needs twice as many log-probabilities, more than engine.max_logprobs "
            f"({engine.max_logprobs}): lower the one or raise the other"
        )
