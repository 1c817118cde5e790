"""Iteration-level scheduling (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, OSDI 2024) over paged KV memory."""

from collections.abc import Sequence

from paged_jax.config import EngineConfig
from paged_jax.engine.policies import VictimPolicy, WaitingQueue
from paged_jax.engine.request import Request, RequestStatus
from paged_jax.execution.plan import ScheduledRequest, SchedulerOutput, StepResult
from paged_jax.kv_cache.manager import KVCacheManager
from paged_jax.kv_cache.usage import KVUsage


class Scheduler:
    """Decides each step anew: who runs, how many tokens of each, who waits, who is preempted.

    Running requests come first, in order of admission, each with all tokens it lacks or what is left of the budget:
    one for a decode, a chunk for a prefill. Blocks that a running request lacks are taken from victims, whose
    computed tokens are recomputed later. Waiting requests are admitted while slots, blocks and budget last, unless
    somebody was preempted in this step.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_cache: KVCacheManager,
        waiting: WaitingQueue,
        victims: VictimPolicy,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.kv_cache = kv_cache
        self.waiting = waiting
        self.running: list[Request] = []
        self._victims = victims
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._chunked = config.enable_chunked_prefill
        self._num_slots = config.max_num_seqs
        self._free_slots = list(reversed(range(self._num_slots)))
        self._eos_token_ids = frozenset(eos_token_ids)

    def add(self, request: Request) -> None:
        """Queue a request that has been validated."""
        self.waiting.add(request)

    def schedule(self) -> SchedulerOutput:
        """Plan one step and take the blocks for it."""
        budget = self._max_num_batched_tokens
        planned: dict[Request, int] = {}
        preempted: list[Request] = []
        for request in tuple(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # a victim of this very step
            wanted = len(request.token_ids) - request.num_computed_tokens
            count = min(wanted, budget)
            if count == 0 or (count < wanted and not self._chunked):
                continue
            while not self.kv_cache.extend(request, count):
                victim = self._victims.choose(self.running)
                budget += planned.pop(victim, 0)  # it may have had its turn in this step already
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                planned[request] = count
                budget -= count
        admitted: list[Request] = []
        while not preempted and self.waiting and self._free_slots and budget:
            request = self.waiting.peek()
            match = self.kv_cache.match(request)
            wanted = len(request.token_ids) - len(match[0]) * self.kv_cache.block_size
            count = min(wanted, budget)
            if count < wanted and not self._chunked:
                break
            if not self.kv_cache.admit(request, match, count):
                break
            self._admit(request)
            admitted.append(request)
            planned[request] = count
            budget -= count
        scheduled = tuple(
            ScheduledRequest(r, r.num_computed_tokens, n, r.num_computed_tokens + n == len(r.token_ids))
            for r, n in planned.items()
        )
        # a plan of nothing is not run: what was given up waits for the next one
        emptied = tuple(self.kv_cache.take_emptied()) if scheduled else ()
        return SchedulerOutput(scheduled, tuple(admitted), tuple(preempted), emptied)

    def update(self, plan: SchedulerOutput, result: StepResult, now: float) -> tuple[list[Request], KVUsage]:
        """Book a step's tokens, offer full blocks to the prefix cache, and end requests that are done.

        Returns the requests that gained a token, and the KV usage before those that ended gave their blocks back.
        """
        advanced = []
        for part, new_tokens in zip(plan.scheduled, result.token_ids, strict=True):
            request = part.request
            request.num_computed_tokens = part.start + part.num_tokens
            self.kv_cache.publish(request)
            for token in new_tokens:
                request.token_ids.append(token)
                request.metrics.token_times.append(now)
                self._check_stop(request, token)
                if request.finish_reason is not None:
                    break
            if new_tokens:
                advanced.append(request)
                if request.metrics.first_token_time is None:
                    request.metrics.first_token_time = now
        usage = self.kv_cache.usage(self.running)
        for request in advanced:
            if request.finish_reason is not None:
                self.finish(request, request.finish_reason, now)
        return advanced, usage

    def retract(self, plan: SchedulerOutput) -> None:
        """Take back a step whose result was lost: its requests are preempted, to be recomputed from their tokens."""
        for part in reversed(plan.scheduled):
            if part.request.status is RequestStatus.RUNNING:
                self._preempt(part.request)

    def finish(self, request: Request, reason: str, now: float) -> None:
        """End a request wherever it is; its blocks and slot are free at once."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.metrics.finished_time = now
        stop_string = request.text.finish() if request.text is not None else None
        if stop_string is not None:  # completed by the characters that were held back until the end
            request.finish_reason = "stop"
            request.stop_reason = stop_string

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, slots and lists of requests agree."""
        self.kv_cache.check_integrity(self.running)
        slots = [request.slot for request in self.running]
        assert None not in slots, "a running request has no slot"
        assert sorted(slots + self._free_slots) == list(range(self._num_slots)), "a slot is lost or has two owners"
        for request in self.waiting:
            assert request.slot is None, "a waiting request owns a slot"
            assert not request.block_tables, "a waiting request holds blocks"

    def _admit(self, request: Request) -> None:
        self.waiting.remove(request)
        if request.status is RequestStatus.WAITING:
            request.metrics.num_cached_tokens = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        self.running.append(request)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.metrics.num_preemptions += 1
        self.waiting.requeue(request)

    def _release(self, request: Request) -> None:
        self.kv_cache.free(request)
        self._free_slots.append(request.slot)
        request.slot = None

    def _check_stop(self, request: Request, token: int) -> None:
        """Set the finish and stop reasons if this token ends the request, and add its text if it has any."""
        params = request.sampling_params
        is_eos = token in self._eos_token_ids and not params.ignore_eos
        is_stop_token = token in params.stop_token_ids
        if is_eos or is_stop_token:
            request.finish_reason = "stop"
            request.stop_reason = token if is_stop_token else None
        elif request.num_output_tokens == params.max_tokens or len(request.token_ids) >= request.max_total_tokens:
            request.finish_reason = "length"
        if request.text is not None and (request.finish_reason != "stop" or params.include_stop_str_in_output):
            stop_string = request.text.append(token)
            if stop_string is not None:
                request.finish_reason = "stop"
                request.stop_reason = stop_string
