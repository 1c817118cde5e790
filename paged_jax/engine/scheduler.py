"""Iteration-level scheduling (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, OSDI 2024) over paged KV memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from paged_jax.config import EngineConfig
from paged_jax.engine.beam_rows import advance_search
from paged_jax.engine.beam_search import BeamSearch
from paged_jax.engine.draft import Draft
from paged_jax.engine.policies import BatchingPolicy, PreemptionPolicy, QueuePolicy, VictimPolicy
from paged_jax.engine.request import Request, RequestStatus
from paged_jax.engine.stop import check_stop, finish_text
from paged_jax.execution.plan import Fork, SchedulerOutput, StepResult, Swap, TokenLogprobs
from paged_jax.kv_cache.manager import KVCacheManager, Record
from paged_jax.kv_cache.usage import KVUsage


@dataclass(frozen=True)
class Policies:
    """Who decides what."""

    waiting: QueuePolicy
    victims: VictimPolicy
    preemption: PreemptionPolicy
    batching: BatchingPolicy


class Outcome(NamedTuple):
    """What a step's result has changed."""

    advanced: list[Request]
    """Requests that gained a token; those that ended with it are among them."""
    left: list[Request]
    """Requests that are finished now."""
    usage: KVUsage
    """Before those gave their blocks back."""


class Scheduler:
    """Decides each step anew: who runs, how many tokens of each, who waits, who is preempted.

    First every running decode gets the block that its next token may need; blocks that are lacking are taken from
    victims, whose computed tokens are recomputed or swapped back later. Then the step's budget is divided: decodes take
    one token each, running prefills what they lack or what is left, in order of admission, and waiting requests are
    admitted while slots, blocks and budget last, unless somebody had to give way in this step. With `prefill_first` the
    decodes come last and may have to pause.
    """

    def __init__(self, config: EngineConfig, kv_cache: KVCacheManager, policies: Policies) -> None:
        self.kv_cache = kv_cache
        self.record: Record | None = None
        self.waiting = policies.waiting
        self.running: list[Request] = []
        self.ended_rows: list[Request] = []
        """Of a batch that is not done: those that have ended and keep their rows."""
        self._policies = policies
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_chunk = kv_cache.max_chunk
        self._chunked = config.enable_chunked_prefill
        self._prefill_first = config.budget_order == "prefill_first"
        self._max_preemptions = config.max_preemptions
        self._num_slots = config.max_num_seqs
        self._free_slots = list(reversed(range(self._num_slots)))
        self._swap_outs: list[Swap] = []  # not yet in a plan that was run
        self.reforked: list[Request] = []
        """Beams whose slot has another content than the device knows."""
        self.parked: list[Request] = []
        """Beams that gave way after their offer, until their search goes on."""
        self._leaders: dict[Request, None] = {}  # running, with samples that begin when the prompt is computed
        self._left: list[Request] = []  # finished by themselves, and not yet told
        self._ended_in_flight = False  # somebody ended between the launch of a step and its result
        self._now = 0.0

    def add(self, request: Request, now: float) -> None:
        """Queue a request that has been validated; the other samples of its prompt begin when it is computed."""
        request.queued_time = now
        self.waiting.add(request)

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan one step and take the blocks for it; `now` is in seconds on the engine's clock."""
        self._ended_in_flight = False
        self._now = now
        if self.ended_rows and not self.running:  # the last member of the batch was preempted or aborted
            self._let_ended_rows_leave(now)
        self._policies.batching.begin(self.waiting, self.running)
        draft = Draft(self._max_num_batched_tokens - len(self.ended_rows))
        prefills = self._take_decodes(draft)
        if not self._prefill_first:
            draft.charge_decodes()
        self._take_chunks(prefills, draft)
        if not draft.preempted:
            self._take_waiting(draft)
        if self._prefill_first:
            draft.cut_decodes()
        if draft.is_empty and not draft.preempted and self.running:
            # all who run are beams that wait for others, which they leave no room
            self._preempt_in(draft, max(self.running, key=lambda request: request.number))
        return self._finished_plan(draft)

    def update(self, plan: SchedulerOutput, result: StepResult, now: float) -> Outcome:
        """Book a step's tokens, offer full blocks to the prefix cache, and end requests that are done."""
        kv_cache, chunks, forks = self.kv_cache, plan.chunks, plan.forks
        rows = [*plan.decodes, *(part.request for part in chunks), *(fork.child for fork in forks)]
        token_ids, logprobs, decodes = result.token_ids, result.logprobs, plan.decodes
        if self._ended_in_flight:  # aborted between the launch of the step and its result
            alive = [row.status is not RequestStatus.FINISHED for row in rows]
            rows, token_ids = list(compress(rows, alive)), list(compress(token_ids, alive))
            logprobs = logprobs and list(compress(logprobs, alive))
            decodes = [r for r in decodes if r.status is not RequestStatus.FINISHED]
            chunks = [c for c in chunks if c.request.status is not RequestStatus.FINISHED]
            forks = [f for f in forks if f.child.status is not RequestStatus.FINISHED]
        self._ended_in_flight = False
        for request in decodes:
            computed = request.num_computed_tokens = request.num_computed_tokens + 1
            if computed >= request.next_publish:
                kv_cache.publish(request)
        for request, start, num_tokens, _ in chunks:
            request.num_computed_tokens = start + num_tokens
            kv_cache.publish(request)
        kv_cache.advance(len(decodes) + sum(part.num_tokens for part in chunks))
        for parent, child in forks:
            self.begin_sample(parent, child, now)
        for parent in {parent for parent, _ in forks}:
            parent.pending_samples = ()
            self._leaders.pop(parent, None)
        searches: dict[BeamSearch, None] = {}
        if logprobs is not None:
            rows, token_ids = self._book_logprobs(rows, token_ids, logprobs, searches)
        ended: list[Request] = []
        advanced = rows  # decodes and forks all sample
        if chunks:
            advanced = [request for request, tokens in zip(rows, token_ids, strict=True) if tokens]
        for request, tokens in zip(rows, token_ids, strict=True):
            for token in tokens:
                all_tokens = request.token_ids
                all_tokens.append(token)
                request.metrics.token_times.append(now)
                if (
                    token in request.end_token_ids
                    or len(all_tokens) >= request.max_total_tokens
                    or request.text is not None
                ):
                    check_stop(request, token)
                    if request.finish_reason is not None:
                        ended.append(request)
                        break
        for search in searches:
            if search.is_ready:
                advanced = [*advanced, *advance_search(self, search, now)]
                ended += search.beams if search.is_finished else ()
        usage = kv_cache.usage()
        for request in ended:
            if not request.is_finished:
                self._end(request, now)
        if self.ended_rows and not self.running:
            self._let_ended_rows_leave(now)
        return Outcome(advanced, self.take_left(), usage)

    def take_left(self) -> list[Request]:
        """Requests that have finished since they were asked for last, but for those that `finish` was called for."""
        left, self._left = self._left, []
        return left

    def retract(self, plan: SchedulerOutput) -> None:
        """Take back a step whose result was lost: all who run are preempted, to be recomputed from their tokens.

        Nobody knows what of it was done: those that were not scheduled may still lack a copy, or a slot on the device.
        """
        for request in reversed(self.running):
            self._preempt(request)
        for swap in plan.swap_outs:
            if swap.request.status is RequestStatus.SWAPPED:
                self._forget_swapped(swap.request)

    def finish(self, request: Request, reason: str, now: float) -> None:
        """End a request wherever it is; its blocks and slot are free at once."""
        self._ended_in_flight = True
        if request in self.ended_rows:
            self.ended_rows.remove(request)
            self._release(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request in request.samples[0].pending_samples:
            leader = request.samples[0]
            leader.pending_samples = tuple(r for r in leader.pending_samples if r is not request)
            self._release(request)
        elif request in self.parked:
            self.parked.remove(request)
        else:
            self._count_wait(request, now)
            self.waiting.remove(request)
            if request.status is RequestStatus.SWAPPED:
                self._forget_swapped(request)
        self._close(request, reason, now)

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, slots and lists of requests agree."""
        holders = [*self.running, *self.ended_rows]
        self.kv_cache.check_integrity(holders, list(self.waiting))
        pending = [child for request in holders for child in request.pending_samples]
        slots = [request.slot for request in holders + pending]
        assert None not in slots, "a running request has no slot"
        assert not any(r.block_tables or r.host_blocks for r in self.parked), "a beam that gave way holds blocks"
        assert sorted(slots + self._free_slots) == list(range(self._num_slots)), "a slot is lost or has two owners"
        for request in self.waiting:
            assert request.slot is None, "a waiting request owns a slot"
            assert not request.block_tables, "a waiting request holds blocks"
            swapped = request.status is RequestStatus.SWAPPED
            assert bool(request.host_blocks) == swapped, "host memory is held by a request that is not swapped out"
            assert swapped or request.num_computed_tokens == 0, "a waiting request counts computed tokens"

    def _take_decodes(self, draft: Draft) -> list[Request]:
        """Give the running decodes room for a token each; returns the others that have something to compute."""
        prefills = []
        decodes, preempted = draft.decodes, draft.preempted
        for request in tuple(self.running):
            computed = request.num_computed_tokens
            lacking = len(request.token_ids) - computed
            if lacking == 1:
                if preempted and request.slot is None:
                    continue  # a victim of this very step
                if computed < request.num_writable_tokens or self._make_room(request, 1, draft):
                    decodes.append(request)
            elif lacking:
                prefills.append(request)
        return prefills

    def _take_chunks(self, prefills: Sequence[Request], draft: Draft) -> None:
        for request in prefills:
            if request.slot is None:
                continue  # a victim of this very step
            count = self._chunk_size(request.num_computed_tokens, request, draft.budget)
            if count and self._make_room(request, count, draft):
                draft.add(request, count)

    def _take_waiting(self, draft: Draft) -> None:
        waiting, batching = self.waiting, self._policies.batching
        while waiting and draft.budget > 0:
            if not self._free_slots and not waiting.may_displace:
                return  # some policies look long for who is next
            request = waiting.peek()
            if request in draft.preempted or not batching.admits(request):
                return  # displaced in this very step, or not of this batch
            if not self._admit(request, draft) and not self._displace(request, draft):
                return

    def _admit(self, request: Request, draft: Draft) -> bool:
        """Give a waiting request slots, blocks and its part of the budget, or nothing."""
        if len(self._free_slots) <= len(request.pending_samples):
            return False
        kv_cache = self.kv_cache
        if request.status is RequestStatus.SWAPPED:
            count = self._chunk_size(request.num_computed_tokens, request, draft.budget)
            moved = kv_cache.swap_in(request, count) if count else None
            if moved is None:
                return False
            draft.swap_ins.append(Swap(request, *moved))
        else:
            cached = kv_cache.num_cached_tokens(request)
            count = self._chunk_size(cached, request, draft.budget)
            if not count or not kv_cache.admit(request, count):
                return False
        self.waiting.admitted(request)
        self._count_wait(request, self._now)
        metrics = request.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = self._now
            metrics.num_cached_tokens = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        for owner in (request, *request.pending_samples):
            owner.slot = self._free_slots.pop()
            draft.admitted.append(owner)
        self.running.append(request)
        if request.pending_samples:
            self._leaders[request] = None
        self._policies.batching.joined(request)
        draft.add(request, count)
        return True

    def _count_wait(self, request: Request, now: float) -> None:
        request.metrics.max_wait = max(request.metrics.max_wait, now - request.queued_time)

    def _chunk_size(self, computed: int, request: Request, budget: int) -> int:
        """Tokens of a request to compute in this step; 0 where its prompt may not be split and does not fit."""
        lacking = len(request.token_ids) - computed
        count = min(lacking, budget, self._max_chunk)
        return count if count == lacking or self._chunked else 0

    def _make_room(self, request: Request, count: int, draft: Draft) -> bool:
        """Get the blocks for a running request's next tokens; False if it had to give way itself."""
        while not self.kv_cache.extend(request, count):
            victim = self._choose_victim()
            self._preempt_in(draft, victim)
            if victim is request:
                return False
        return True

    def _choose_victim(self) -> Request:
        """The victim policy's choice among those that were not preempted too often; of such, the last to arrive."""
        fair_game = [r for r in self.running if r.metrics.num_preemptions < self._max_preemptions]
        if fair_game:
            return self._chosen(fair_game)
        return max(self.running, key=lambda request: request.number)

    def _displace(self, waiting: Request, draft: Draft) -> bool:
        """Preempt somebody whose place the queue policy gives to the one that waits.

        False if there is nobody, or if all of them together could not make the room that it lacks.
        """
        if not self.waiting.may_displace or not self._chunk_size(waiting.num_computed_tokens, waiting, draft.budget):
            return False
        yielding = [
            r
            for r in self.running
            if r.metrics.num_preemptions < self._max_preemptions
            and r not in draft.admitted
            and self.waiting.displaces(waiting, r)
        ]
        slots = len(self._free_slots) + sum(1 + len(r.pending_samples) for r in yielding)
        if not yielding or slots <= len(waiting.pending_samples) or not self.kv_cache.has_room_after(yielding, waiting):
            return False
        self._preempt_in(draft, self._chosen(yielding))
        return True

    def _chosen(self, candidates: list[Request]) -> Request:
        victim = self._policies.victims.choose(candidates)
        if victim not in candidates:
            policy = type(self._policies.victims).__name__
            raise RuntimeError(f"victim policy {policy} chose {victim!r}, which is not one of those that it was given")
        return victim

    def _preempt_in(self, draft: Draft, victim: Request) -> None:
        """Preempt a request, which may have had its turn in this step already."""
        draft.withdraw(victim)
        lacking = len(victim.token_ids) - victim.num_computed_tokens
        swaps = victim.num_computed_tokens and lacking and self._policies.preemption.swaps(victim)
        moved = self.kv_cache.swap_out(victim) if swaps else None
        if moved is not None:
            self._swap_outs.append(Swap(victim, *moved))
        if self.record is not None:
            self.record("preempt", request=victim, how="swap" if moved is not None else "recompute")
        victim.metrics.num_preemptions += 1
        draft.preempted.append(victim)
        self._preempt(victim, swapped=moved is not None)

    def _preempt(self, request: Request, swapped: bool = False) -> None:
        self.running.remove(request)
        request.status = RequestStatus.SWAPPED if swapped else RequestStatus.PREEMPTED
        self._release(request)
        for child in request.pending_samples:
            self._release(child)
        if request.beam_search is not None and request.beam_search.has_offer(request):
            self.parked.append(request)  # there is nothing to compute for it now
            return
        request.queued_time = self._now
        self.waiting.requeue(request)

    def _forget_swapped(self, request: Request) -> None:
        """What was swapped out is lost or of no use: the request is recomputed."""
        self.kv_cache.discard_swapped(request)
        self._swap_outs = [swap for swap in self._swap_outs if swap.request is not request]
        request.status = RequestStatus.PREEMPTED

    def _release(self, request: Request) -> None:
        """Give back the slot, and the blocks that are still there."""
        self._leaders.pop(request, None)
        if request.block_tables:
            self.kv_cache.free(request)
        if request.slot is not None:
            self._free_slots.append(request.slot)
            request.slot = None

    def _finished_plan(self, draft: Draft) -> SchedulerOutput:
        decodes, chunks, idle = draft.decodes, draft.chunks, tuple(self.ended_rows)
        if draft.is_empty:
            # a plan of nothing is not run: what was given up and swapped out waits for the next one
            return SchedulerOutput(preempted=tuple(draft.preempted))
        forks: list[Fork] = []
        if self._leaders or self.reforked:
            parts = {*decodes, *(part.request for part in chunks if part.samples)}
            forks = [
                Fork(leader, child)
                for leader in self._leaders
                if leader in parts and leader.beam_search is None
                for child in leader.pending_samples
            ]
            draft.admitted += [r for r in self.reforked if r in parts and r not in draft.admitted]
            self.reforked = [r for r in self.reforked if r not in parts and r.slot is not None]
        swap_outs, self._swap_outs = self._swap_outs, []
        return SchedulerOutput(
            decodes=decodes,
            chunks=chunks,
            forks=forks,
            idle=idle,
            admitted=draft.admitted,
            preempted=draft.preempted,
            swap_outs=swap_outs,
            copies=self.kv_cache.take_copies(),
            swap_ins=draft.swap_ins,
            emptied_blocks=self.kv_cache.take_emptied(),
            num_tokens=len(decodes) + len(idle) + sum([part.num_tokens for part in chunks]),
        )

    def _book_logprobs(
        self,
        rows: Sequence[Request],
        token_ids: Sequence[tuple[int, ...]],
        logprobs: Sequence[TokenLogprobs | None],
        searches: dict[BeamSearch, None],
    ) -> tuple[list[Request], list[tuple[int, ...]]]:
        """Keep the log-probabilities that were asked for; returns the rows that are no beams, and their tokens."""
        others: list[Request] = []
        others_tokens: list[tuple[int, ...]] = []
        for request, tokens, entry in zip(rows, token_ids, logprobs, strict=True):
            if request.beam_search is None:
                others.append(request)
                others_tokens.append(tokens)
                if tokens and request.logprobs is not None:
                    request.logprobs.append(entry)
            elif tokens:
                request.beam_search.offer(request, entry)
                searches[request.beam_search] = None
        return others, others_tokens

    def begin_sample(self, parent: Request, child: Request, now: float) -> None:
        """A sample of a prompt that has been computed: it shares the blocks, and runs on its own from here."""
        child.metrics.first_scheduled_time = parent.metrics.first_scheduled_time
        child.metrics.num_cached_tokens = parent.metrics.num_cached_tokens
        child.status = RequestStatus.RUNNING
        self.running.append(child)
        if not self.kv_cache.fork(parent, child):
            self.wait_for_recomputation(child, now)

    def wait_for_recomputation(self, request: Request, now: float) -> None:
        """There is no room for another copy of what a running request begins with: it begins later, by itself."""
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        self._release(request)
        if self.record is not None:
            self.record("wait", request=request)
        request.queued_time = now
        self.waiting.requeue(request)

    def _end(self, request: Request, now: float) -> None:
        """A request has ended by itself; in a static batch its row stays."""
        if request.status is RequestStatus.RUNNING and self._policies.batching.keeps_rows:
            self.running.remove(request)
            self.ended_rows.append(request)
        else:
            self.finish(request, request.finish_reason, now)
            self._left.append(request)

    def _let_ended_rows_leave(self, now: float) -> None:
        for request in tuple(self.ended_rows):
            self.finish(request, request.finish_reason, now)
            self._left.append(request)

    def _close(self, request: Request, reason: str, now: float) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.metrics.finished_time = now
        held = finish_text(request)
        if self.record is not None:
            self.record("finish", request=request, held=held)
