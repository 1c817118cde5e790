"""Who shares a batch: static batching in a small scheduler of its own, with slots, blocks and a token budget."""

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import given
from policy_context import FakeEngine

from paged_jax.engine.policies import load_policy
from paged_jax.engine.request import Request, RequestStatus


@dataclass
class Rows:
    """Steps of an engine that knows nothing but who runs: admission in the queue's order, one block per request."""

    batching: str = "static"
    scheduling_policy: str = "fcfs"
    num_slots: int = 2
    num_blocks: int = 99
    budget: int = 100
    running: list[Request] = field(default_factory=list)
    joins: list[list[int]] = field(default_factory=list)
    """Numbers of those admitted, step by step."""

    def __post_init__(self) -> None:
        self.engine = FakeEngine(batching=self.batching, scheduling_policy=self.scheduling_policy)
        self.queue = load_policy("scheduling_policy", self.scheduling_policy)(self.engine.context)
        self.policy = load_policy("batching", self.batching)(self.engine.context)

    def add(self, *output_lens: int, **fields: Any) -> list[Request]:
        """Requests arrive; their outputs have these lengths."""
        requests = [self.engine.request(output_len, **fields) for output_len in output_lens]
        for request in requests:
            self.queue.add(request)
        return requests

    def preempt(self, request: Request, status: RequestStatus = RequestStatus.PREEMPTED) -> None:
        self.running.remove(request)
        request.status = status
        request.num_computed_tokens = 0
        self.queue.requeue(request)

    def step(self) -> list[int]:
        """Plan and run one step; numbers of those that joined."""
        self.policy.begin(self.queue, self.running)
        budget, joined = self.budget, []
        counts: dict[Request, int] = {}

        def compute(request: Request) -> None:
            nonlocal budget
            wanted = len(request.token_ids) - request.num_computed_tokens
            counts[request] = min(wanted, budget) if not request.is_finished else 0
            budget -= counts[request]

        for request in self.running:
            compute(request)
        while self.queue and len(self.running) < min(self.num_slots, self.num_blocks) and budget:
            request = self.queue.peek()
            if not self.policy.admits(request):
                break
            self.queue.remove(request)
            self.policy.joined(request)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            joined.append(request.number)
            compute(request)
        for request, count in counts.items():
            request.num_computed_tokens += count
            if count and request.num_computed_tokens == len(request.token_ids):
                request.token_ids.append(0)
                if request.num_output_tokens == request.expected_output_len:
                    request.status = RequestStatus.FINISHED
        if not self.policy.keeps_rows or all(r.is_finished for r in self.running):
            self.running = [r for r in self.running if not r.is_finished]
        self.joins.append(joined)
        return joined

    def finish(self) -> list[list[int]]:
        """Step until nobody is left; who joined in each step that somebody joined in."""
        for _ in range(2000):
            if not self.queue and not self.running:
                return [joined for joined in self.joins if joined]
            self.step()
        raise AssertionError("somebody waits for ever")


def test_continuous_batching_lets_anybody_join() -> None:
    rows = Rows("continuous")
    rows.add(1, 5)
    assert rows.step() == [0, 1]
    rows.add(1)
    assert rows.step() == [2], "request 0 has left"


def test_a_static_batch_is_done_before_the_next_begins() -> None:
    rows = Rows()
    rows.add(1, 5, 2)
    assert rows.step() == [0, 1]
    assert [r.number for r in rows.running] == [0, 1], "the row of request 0 stays"
    rows.add(1)
    assert rows.finish() == [[0, 1], [2, 3]]
    assert rows.joins.index([2, 3]) == 5, "after the five tokens of request 1"


def test_latecomers_do_not_fill_free_slots() -> None:
    rows = Rows(num_slots=4)
    rows.add(3, 3)
    assert rows.step() == [0, 1]
    rows.add(3)
    assert rows.finish() == [[0, 1], [2]]


def test_a_batch_may_take_several_steps_to_prefill() -> None:
    """Prompts of 7 at 4 tokens a step: request 1 waited when the batch opened, and finds budget in step 2."""
    rows = Rows(num_slots=4, budget=4)
    rows.add(9, 9, prompt_len=7)
    assert rows.step() == [0]
    rows.add(9)
    assert rows.step() == [1]
    assert rows.finish() == [[0], [1], [2]]


def test_a_budget_spent_to_the_last_token_does_not_close_the_batch() -> None:
    """Request 0 takes whole steps; request 2 has to wait for the tokens that request 1 leaves over."""
    rows = Rows(num_slots=4, budget=4)
    rows.add(9, 9, 9, prompt_len=8)
    assert [rows.step() for _ in range(5)] == [[0], [], [1], [], [2]]
    rows = Rows(num_slots=2, budget=2)
    rows.add(9, 9, prompt_len=6)
    assert [rows.step() for _ in range(4)] == [[0], [], [], [1]], "two tokens that are left are no decode"


def test_what_memory_kept_out_stays_out() -> None:
    rows = Rows(num_slots=4, num_blocks=1)
    rows.add(9, 9)
    assert [rows.step(), rows.step(), rows.step()] == [[0], [], []]
    rows.num_blocks = 4
    assert rows.finish() == [[0], [1]]
    assert rows.joins.index([1]) == 9


def test_a_preempted_member_comes_back_and_nobody_takes_its_place() -> None:
    for status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED):
        rows = Rows(scheduling_policy="sjf")
        first, _ = rows.add(6, 6)
        rows.add(9)
        assert [rows.step(), rows.step(), rows.step()] == [[0, 1], [], []]
        rows.preempt(first, status)
        assert rows.step() == [0]
        assert rows.finish() == [[0, 1], [0], [2]]


def test_a_place_that_a_preempted_member_left_is_not_given_away() -> None:
    rows = Rows(scheduling_policy="priority")
    _, second = rows.add(6, 6, priority=1)
    assert [rows.step(), rows.step()] == [[0, 1], []]
    rows.add(1, priority=0)
    rows.preempt(second)
    assert rows.step() == [], "the newcomer is next in the queue, and not a member"
    assert rows.finish() == [[0, 1], [2, 1]], "with nobody left to run a new batch opens, for both"


def test_one_who_arrived_too_late_closes_the_batch_when_it_is_next() -> None:
    """Whoever of the batch has not joined by then waits with the latecomer."""
    rows = Rows(scheduling_policy="sjf", num_slots=4, budget=4)
    rows.add(9, 12, prompt_len=7)
    assert rows.step() == [0]
    (late,) = rows.add(1)
    assert rows.step() == []
    rows.queue.remove(late)  # aborted
    assert rows.step() == []
    assert rows.finish() == [[0], [1]]


def test_a_batch_opens_for_those_that_wait() -> None:
    rows = Rows()
    assert rows.step() == []
    rows.add(1)
    assert rows.step() == [0]
    assert not rows.policy.admits(rows.engine.request())


def test_all_samples_of_a_waiting_prompt_belong_to_its_batch() -> None:
    rows = Rows()
    (parent,) = rows.add(3)
    sample, stranger = rows.engine.request(), rows.engine.request()
    parent.siblings = sample.siblings = (parent, sample)
    rows.policy.begin(rows.queue, [])
    assert rows.policy.admits(parent)
    assert rows.policy.admits(sample)
    assert not rows.policy.admits(stranger)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6), st.integers(1, 9), st.integers(0, 2)),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("preempt"), st.integers(0, 9)),
    ),
    max_size=50,
)


@given(
    events=EVENTS,
    scheduling_policy=st.sampled_from(["fcfs", "sjf", "priority"]),
    num_slots=st.integers(1, 4),
    spare_budget=st.integers(0, 8),
)
def test_members_of_a_batch_waited_when_it_opened(
    events: list[tuple[Any, ...]], scheduling_policy: str, num_slots: int, spare_budget: int
) -> None:
    rows = Rows("static", scheduling_policy, num_slots, budget=num_slots + spare_budget)
    batch: set[int] = set()
    has_only_decoded = False

    def step() -> None:
        nonlocal batch, has_only_decoded
        running = list(rows.running)
        if not running:
            batch = {r.number for r in rows.queue}
            has_only_decoded = False
        preempted = {r.number for r in rows.queue if r.status is RequestStatus.PREEMPTED}
        prefilling = any(len(r.token_ids) - r.num_computed_tokens > 1 for r in running)
        joined = set(rows.step())
        assert joined <= batch, "a latecomer joined"
        if has_only_decoded:
            assert joined <= preempted, "somebody joined a batch that had closed"
        has_only_decoded = has_only_decoded or (bool(running) and not prefilling and not joined)

    for name, *values in events:
        if name == "add":
            output_len, prompt_len, priority = values
            rows.add(output_len, prompt_len=prompt_len, priority=priority)
        elif name == "step":
            step()
            assert not rows.running or not all(r.is_finished for r in rows.running), "a batch that is done leaves whole"
        elif name == "preempt":
            alive = [r for r in rows.running if not r.is_finished]
            if alive:
                rows.preempt(alive[values[0] % len(alive)])
                if all(r.is_finished for r in rows.running):
                    rows.running = []
    rows.finish()
