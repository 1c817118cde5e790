"""Steps an engine on a `HostExecutor` and checks at every step what must hold whatever happens."""

from collections.abc import Callable, Sequence

from host_executor import check_accounting
from requests_alone import Expectation, Params, add_request

from paged_jax.engine.engine import Engine
from paged_jax.engine.policies.aged_queue import AgedQueue
from paged_jax.engine.request import Request
from paged_jax.execution.plan import SchedulerOutput


class Watcher:
    """Requests answer what they answer alone, end once, and leave nothing behind."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.live: list[Expectation] = []
        self.ended: list[Expectation] = []

    def add(
        self, prompt: Sequence[int], params: Params, request_id: str | None = None, **fields: object
    ) -> Expectation:
        """Queue a request; its id is the number of those before it if none is given."""
        name = str(len(self.live) + len(self.ended)) if request_id is None else request_id
        self.live.append(add_request(self.engine, name, prompt, params, **fields))
        return self.live[-1]

    def step(self, on_submit: Callable[[SchedulerOutput], None] | None = None) -> None:
        """One step; `on_submit` is called between its launch and its result, and may interrupt it."""
        engine = self.engine
        plans = len(engine.executor.plans)
        now = engine.clock.now()
        waiting = list(engine.scheduler.waiting)

        def planned(plan: SchedulerOutput) -> None:
            self._check_watermark(plan, waiting)
            if on_submit is not None:
                on_submit(plan)

        engine.executor.on_submit = planned
        try:
            advanced = engine.step()
            self._check_victims(engine.executor.plans[plans:])
        except KeyboardInterrupt:
            assert on_submit is not None
            advanced = []
        engine.executor.loses_plan = False
        for plan in engine.executor.plans[plans:]:
            self._check_admissions(plan, waiting, now)
        assert len(set(advanced)) == len(advanced), "a request is reported twice"
        self._check_ended([request for request in advanced if request.is_finished])
        check_accounting(engine)

    def abort(self, expectation: Expectation) -> None:
        """End a request from outside."""
        ended = [r for r in expectation.leader.samples if r.is_finished]
        self.engine.abort(expectation.leader.request_id)
        for request in expectation.leader.samples:
            if request not in ended:
                assert request.finish_reason == "abort"
        self._check_ended([r for r in expectation.leader.samples if r not in ended])

    def _check_ended(self, requests: Sequence[Request]) -> None:
        for expectation in tuple(self.live):
            for request in requests:
                if request in expectation.leader.samples:
                    expectation.check_ended(request)
            if len(expectation.delivered) == len(expectation.leader.samples):
                self.live.remove(expectation)
                self.ended.append(expectation)
        for expectation in [*self.live, *self.ended]:
            expectation.check_unchanged()

    def _check_admissions(self, plan: SchedulerOutput, waiting: Sequence[Request], now: float) -> None:
        """Nobody that arrived later is admitted while one waits that has aged."""
        queue = self.engine.scheduler.waiting
        if not isinstance(queue, AgedQueue) or queue._aging_s is None:
            return
        passed_over = [
            r
            for r in waiting
            if r not in plan.admitted and not r.is_finished and now - r.metrics.arrival_time >= queue._aging_s
        ]
        for request in set(waiting) & set(plan.admitted):
            for other in passed_over:
                assert request.number < other.number, f"{request.number} overtakes {other.number}, which has aged"

    def _check_watermark(self, plan: SchedulerOutput, waiting: Sequence[Request]) -> None:
        """Admission leaves some blocks for others that hold some."""
        scheduler, config = self.engine.scheduler, self.engine.config
        holders = [*scheduler.running, *scheduler.ended_rows]
        if set(waiting) & set(plan.admitted) and len(holders) > 1:
            spare = min(pool.num_available for pool in scheduler.kv_cache.pools)
            assert spare >= int(config.watermark * self.engine.num_blocks), "admission goes beyond the watermark"

    def _check_victims(self, plans: Sequence[SchedulerOutput]) -> None:
        """Whoever was preempted often enough is spared while others run, and then the last to arrive gives way."""
        most = self.engine.config.max_preemptions
        for plan in plans:
            others = {part.request for part in plan.scheduled}.difference(plan.admitted)
            for request in plan.preempted:
                if request.metrics.num_preemptions > most:
                    assert all(other.metrics.num_preemptions >= most for other in others)
                    assert all(other.number < request.number for other in others)

    @property
    def max_steps(self) -> int:
        """Steps within which all live requests end if no other comes.

        A step computes at least one token. A request is preempted at most `max_preemptions` times before it is spared,
        and spared ones give way only to older ones of them, so each computes all its tokens at most once for each of
        these times, for each older request, and once more.
        """
        samples = [r for expectation in self.live for r in expectation.leader.samples]
        times = self.engine.config.max_preemptions + len(samples) + 1
        return times * sum(expectation.max_steps for expectation in self.live)

    def drain(self) -> None:
        """All requests end within `max_steps`, and nothing is left behind."""
        for _ in range(self.max_steps):
            if not self.live:
                break
            self.step()
        assert not self.live, "requests have not ended"
        engine = self.engine
        kv_cache, scheduler = engine.scheduler.kv_cache, engine.scheduler
        assert not engine._requests
        assert not engine.has_unfinished_requests()
        assert not scheduler.running
        assert not scheduler.ended_rows
        assert not scheduler.waiting
        assert len(scheduler._free_slots) == engine.config.max_num_seqs
        assert all(pool.num_in_use == 0 for pool in kv_cache.pools)
        engine.reset_prefix_cache()
        assert all(pool.num_free == engine.num_blocks for pool in kv_cache.pools)
        check_accounting(engine)
        # what the last step gave up on the host comes back with the next plan
        freed = [len(blocks) for blocks in kv_cache._host_freed]
        assert [p.num_free + f for p, f in zip(kv_cache.host_pools, freed, strict=True)] == [
            pool.num_blocks for pool in kv_cache.host_pools
        ]
