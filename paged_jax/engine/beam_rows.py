"""The beams of a search as rows of the batch: which request goes on with which continuation."""

from collections import Counter
from typing import TYPE_CHECKING

from paged_jax.engine.beam_search import BeamSearch
from paged_jax.engine.request import Request, RequestStatus

if TYPE_CHECKING:
    from paged_jax.engine.scheduler import Scheduler


def advance_search(scheduler: "Scheduler", search: BeamSearch, now: float) -> list[Request]:
    """All beams have been extended: keep the best, fork those that are kept more than once; returns all."""
    chosen = search.choose()
    if search.is_finished:
        for request in search.beams:
            request.finish_reason = "length"
        leader = search.beams[0].samples[0]
        pending = leader.pending_samples  # it ended with its first token
        for request in pending:
            scheduler.finish(request, "length", now)
        return [*search.beams, *pending]
    spare = [r for r in search.beams if all(parent is not r for parent, _ in chosen)]
    spare += search.beams[0].samples[0].pending_samples
    children = Counter(parent for parent, _ in chosen)
    history = {parent: list(parent.token_ids) for parent, count in children.items() if count > 1}
    continued: list[Request] = []
    for parent, _ in chosen:
        beam = parent
        if parent in continued:
            beam = spare.pop(0)
            _refork(scheduler, parent, beam, now)
            beam.token_ids = list(history[parent])
        continued.append(beam)
    # tokens come last: a parent must not have moved on when it is forked
    for beam, (parent, token) in zip(continued, chosen, strict=True):
        if scheduler.record is not None:
            scheduler.record("beam", request=beam, parent=parent, token=token)
        beam.token_ids.append(token)
        beam.metrics.token_times.append(now)
    search.continue_with(continued)
    for beam in continued:
        if beam in scheduler.parked:
            scheduler.parked.remove(beam)
            beam.queued_time = now
            scheduler.waiting.requeue(beam)
    return continued


def _refork(scheduler: "Scheduler", parent: Request, beam: Request, now: float) -> None:
    """Let a beam that was given up, or has not begun, go on from where its new parent is."""
    leader = beam.samples[0]
    if beam in leader.pending_samples:
        leader.pending_samples = tuple(r for r in leader.pending_samples if r is not beam)
        scheduler.begin_sample(parent, beam, now)
        return
    beam.block_contents = list(parent.block_contents)
    beam.match = None
    if beam.status is not RequestStatus.RUNNING:
        return
    scheduler.kv_cache.free(beam)
    scheduler.reforked.append(beam)
    if not parent.block_tables or not scheduler.kv_cache.fork(parent, beam):
        scheduler.wait_for_recomputation(beam, now)
