"""Orders of admission: by hand, against plain sorting, and how long they let a request wait."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from policy_context import FakeEngine

from paged_jax.config import EngineConfig
from paged_jax.engine.policies import PolicyContext, QueuePolicy, load_policy
from paged_jax.engine.request import Request

AGING = ["priority", "sjf", "srpt", "longest_prefix_match"]
NEVER = 1e9
"""Seconds: no test lasts that long."""


def queue_of(engine: FakeEngine) -> QueuePolicy:
    """The queue that the engine's config names."""
    queue: QueuePolicy = load_policy("scheduling_policy", engine.context.config.scheduling_policy)(engine.context)
    return queue


def make(policy: str, **config: Any) -> tuple[FakeEngine, QueuePolicy]:
    engine = FakeEngine(scheduling_policy=policy, **config)
    return engine, queue_of(engine)


def admit(queue: QueuePolicy) -> Request:
    """The next request, taken out as a scheduler does it."""
    request = queue.peek()
    queue.admitted(request)
    return request


def drain(queue: QueuePolicy) -> list[int]:
    """Numbers of all requests in order of admission."""
    return [admit(queue).number for _ in range(len(queue))]


def generate(request: Request, count: int) -> None:
    request.token_ids += [0] * count


# by hand


def test_fcfs_puts_the_preempted_in_front_in_order_of_arrival() -> None:
    engine, queue = make("fcfs")
    requests = [engine.request() for _ in range(6)]
    for request in requests[:5]:
        queue.add(request)
    running = [admit(queue) for _ in range(3)]
    for request in (running[1], running[2], running[0]):  # victims of one step, in no order
        queue.requeue(request)
    queue.add(requests[5])
    assert [r.number for r in queue] == [0, 1, 2, 3, 4, 5]
    queue.remove(requests[1])
    queue.remove(requests[4])
    assert drain(queue) == [0, 2, 3, 5]


def test_fcfs_puts_the_preempted_before_requests_with_lower_numbers() -> None:
    """A sample that was forked late has a number from later on, but has run already."""
    engine, queue = make("fcfs")
    early, late = engine.request(), engine.request()
    queue.add(early)
    queue.requeue(late)
    assert drain(queue) == [1, 0]


def test_priority_admits_the_lowest_first_and_ties_in_order_of_arrival() -> None:
    engine, queue = make("priority")
    for priority in (0, 3, -1, 3, 0, -1):
        queue.add(engine.request(priority=priority))
    assert drain(queue) == [2, 5, 0, 4, 1, 3]


def test_priority_gives_a_preempted_request_its_old_place() -> None:
    engine, queue = make("priority")
    for priority in (1, 1, 0):
        queue.add(engine.request(priority=priority))
    assert admit(queue).number == 2
    first = admit(queue)
    queue.add(engine.request(priority=1))
    queue.requeue(first)
    assert drain(queue) == [0, 1, 3]


def test_priority_ages_in_a_minute_unless_told_otherwise() -> None:
    for config, seconds in (({}, 60.0), ({"aging_s": 5.0}, 5.0)):
        engine, queue = make("priority", **config)
        queue.add(engine.request(priority=9))
        engine.time = 1.0
        queue.add(engine.request(priority=8))
        engine.time = 2.0
        queue.add(engine.request(priority=0))
        engine.time = seconds - 0.01
        assert queue.peek().number == 2
        engine.time = seconds
        assert queue.peek().number == 0
        engine.time = seconds + 1
        assert drain(queue) == [0, 1, 2], "aged ones go in order of arrival"


@pytest.mark.parametrize("policy", ["priority", "sjf", "longest_prefix_match", "fcfs", "fair"])
def test_only_srpt_displaces(policy: str) -> None:
    engine, queue = make(policy)
    assert not queue.displaces(engine.request(1, priority=0), engine.request(100, priority=9))


def test_sjf_goes_by_the_whole_output_and_srpt_by_what_remains() -> None:
    orders = {}
    for policy in ("sjf", "srpt"):
        engine, queue = make(policy)
        for output_len in (9, 5, 7, 5):
            queue.add(engine.request(output_len))
        long = next(r for r in queue if r.number == 0)
        queue.remove(long)
        generate(long, 5)  # 4 of 9 remain
        queue.requeue(long)
        orders[policy] = drain(queue)
    assert orders == {"sjf": [1, 3, 2, 0], "srpt": [0, 1, 3, 2]}


def test_srpt_displaces_for_strictly_less_that_remains() -> None:
    engine, queue = make("srpt")
    waiting, running = engine.request(5), engine.request(9)
    generate(running, 3)
    assert queue.displaces(waiting, running)  # 5 < 6
    generate(running, 1)
    assert not queue.displaces(waiting, running)
    assert not queue.displaces(running, waiting)


def test_srpt_counts_one_token_for_those_that_outlived_their_prediction() -> None:
    engine, queue = make("srpt")
    outlived, new = engine.request(3), engine.request(1)
    generate(outlived, 7)
    assert not queue.displaces(outlived, new)
    queue.add(new)
    queue.requeue(outlived)
    assert drain(queue) == [0, 1], "both have one token to come: the earlier arrival goes first"


def test_srpt_leaves_aged_requests_alone() -> None:
    for config, spared in (({"aging_s": 10.0}, True), ({}, False)):
        engine, queue = make("srpt", **config)
        running = engine.request(100)
        engine.time = 9.9
        assert queue.displaces(engine.request(1), running)
        engine.time = 10.0
        assert queue.displaces(engine.request(1), running) is not spared


def test_longest_prefix_match_follows_the_cache() -> None:
    engine, queue = make("longest_prefix_match")
    a, b, c = (engine.request() for _ in range(3))
    for request in (a, b, c):
        queue.add(request)
    assert queue.peek() is a, "nothing is cached"
    engine.cached = {b: 16, c: 32}
    assert queue.peek() is c
    engine.cached = {b: 32, c: 32}
    assert drain(queue) == [1, 2, 0]


def test_longest_prefix_match_asks_once_per_request_and_look() -> None:
    engine, queue = make("longest_prefix_match")
    for _ in range(1000):
        queue.add(engine.request())
    assert engine.num_questions == 0
    queue.peek()
    assert engine.num_questions == 1000


def test_fair_spends_deficits_by_hand() -> None:
    """Quantum 10. Round 1: a pays 8 (2 left), b cannot pay 15 (10 kept). Round 2: a pays 12, b pays 15 (5 left)..."""
    engine, queue = make("fair", fair_quantum=10)
    for user, cost in (("a", 8), ("a", 12), ("a", 1), ("b", 15), ("b", 5), ("b", 5)):
        queue.add(engine.request(output_len=1, prompt_len=cost - 1, user=user))
    # ... and 5, then round 3: a's third, and b's third
    assert drain(queue) == [0, 1, 3, 4, 2, 5]


def test_fair_takes_512_tokens_as_its_quantum() -> None:
    engine, queue = make("fair")
    for user, cost in (("a", 512), ("a", 1), ("b", 513), ("c", 512)):
        queue.add(engine.request(output_len=1, prompt_len=cost - 1, user=user))
    assert drain(queue) == [0, 3, 1, 2]


def test_fair_forgets_the_deficit_of_a_user_with_nothing_waiting() -> None:
    engine, queue = make("fair", fair_quantum=10)
    queue.add(engine.request(output_len=1, prompt_len=0, user="a"))
    assert drain(queue) == [0]  # 9 would be left
    queue.add(engine.request(output_len=6, prompt_len=6, user="a"))  # costs 12: with 9 kept, one visit would pay it
    queue.add(engine.request(output_len=5, prompt_len=5, user="b"))
    assert drain(queue) == [2, 1]


def test_fair_charges_a_preempted_request_once() -> None:
    engine, queue = make("fair", fair_quantum=10)
    for user in ("a", "a", "b", "b"):
        queue.add(engine.request(output_len=5, prompt_len=5, user=user))
    first = admit(queue)
    queue.requeue(first)
    # a has spent its quantum, yet request 0 goes: it is paid for, and does not spend the next quantum either
    assert drain(queue) == [0, 2, 1, 3]


def test_fair_charges_nothing_for_requests_aborted_before_their_turn() -> None:
    for aborted in (1, 2):  # the one that the user cannot pay yet, and the one behind it, which it could
        engine, queue = make("fair", fair_quantum=10)
        requests = [engine.request(1, cost - 1, user="a") for cost in (4, 7, 6, 6)]
        requests.append(engine.request(1, 19, user="b"))
        for request in requests:
            queue.add(request)
        assert admit(queue).number == 0  # 6 left
        queue.remove(requests[aborted])
        assert drain(queue) == {1: [2, 3, 4], 2: [1, 3, 4]}[aborted]


def test_fair_charges_nothing_for_one_aborted_when_it_was_next() -> None:
    engine, queue = make("fair", fair_quantum=10)
    requests = [engine.request(5, 5, user=user) for user in ("a", "a", "b")]
    for request in requests:
        queue.add(request)
    assert queue.peek() is requests[0]
    queue.remove(requests[0])
    assert drain(queue) == [1, 2]


def test_fair_keeps_the_place_of_a_preempted_request_before_other_users() -> None:
    engine, queue = make("fair", fair_quantum=10)
    first = engine.request(5, 5, user="a")
    queue.add(first)
    admit(queue)
    for user in ("b", "c", "b"):
        queue.add(engine.request(5, 5, user=user))
    queue.requeue(first)
    assert drain(queue)[0] == first.number


def test_fair_charges_the_samples_of_a_prompt_together() -> None:
    engine, queue = make("fair", fair_quantum=10)
    parent = engine.request(output_len=5, prompt_len=5, user="a")
    parent.pending_samples = (engine.request(output_len=5, prompt_len=5, user="a"),)  # 5 + 2 * 5 together
    queue.add(parent)
    queue.add(engine.request(output_len=5, prompt_len=5, user="b"))
    assert drain(queue) == [2, 0]


@pytest.mark.parametrize("policy", ["sjf", "srpt", "fair"])
def test_a_prediction_that_fails_leaves_the_queue_alone(policy: str) -> None:
    config = EngineConfig(scheduling_policy=policy, length_predictor="oracle")
    predictor = load_policy("length_predictor", "oracle")(config)
    queue = load_policy("scheduling_policy", policy)(PolicyContext(config, lambda: 0.0, predictor.predict, len))
    engine = FakeEngine()
    queue.add(engine.request(3))
    unknown = engine.request()
    unknown.expected_output_len = None
    message = "length_predictor 'oracle' needs the request's expected_output_len, which request 'r1' does not bring"
    with pytest.raises(ValueError, match=message):
        queue.add(unknown)
    assert len(queue) == 1
    assert drain(queue) == [0]


@pytest.mark.parametrize(
    ("name", "config", "predictions"),
    [
        ("oracle", {}, [7, 1]),
        ("prompt_length", {}, [5, 1]),
        ("constant", {}, [256, 256]),
        ("constant", {"constant_output_len": 30}, [30, 30]),
    ],
)
def test_length_predictors(name: str, config: dict[str, Any], predictions: list[int]) -> None:
    config = EngineConfig(scheduling_policy="sjf", length_predictor=name, **config)
    predictor = load_policy("length_predictor", name)(config)
    engine = FakeEngine()
    requests = [engine.request(output_len=7, prompt_len=5), engine.request(output_len=0, prompt_len=0)]
    generate(requests[0], 3)
    assert [predictor.predict(r) for r in requests] == predictions


# against plain sorting


@dataclass
class SortedModel:
    """All that wait, sorted anew at each look."""

    engine: FakeEngine
    waiting: list[Request] = field(default_factory=list)
    returned: set[Request] = field(default_factory=set)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def requeue(self, request: Request) -> None:
        self.waiting.append(request)
        self.returned.add(request)

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)
        self.returned.discard(request)

    admitted = remove

    def peek(self) -> Request:
        return min(self.waiting, key=self._rank)

    def _rank(self, request: Request) -> tuple[int, int, int]:
        config = self.engine.context.config
        policy = config.scheduling_policy
        aging_s = config.aging_s or (60.0 if policy == "priority" else math.inf)
        if policy == "fcfs":
            return (0 if request in self.returned else 1, 0, request.number)
        if self.engine.time - request.metrics.arrival_time >= aging_s:
            return (0, 0, request.number)
        assert request.expected_output_len is not None
        key = {
            "priority": request.priority,
            "sjf": request.expected_output_len,
            "srpt": max(1, request.expected_output_len - request.num_output_tokens),
            "longest_prefix_match": -self.engine.cached.get(request, 0),
        }[policy]
        return (1, key, request.number)


@dataclass
class RoundRobinModel:
    """Deficit round-robin, quantum by quantum."""

    quantum: int
    costs: dict[Request, int] = field(default_factory=dict)
    users: list[str] = field(default_factory=list)
    queues: dict[str, list[Request]] = field(default_factory=dict)
    deficits: dict[str, int] = field(default_factory=dict)
    granted: bool = False
    returned: list[Request] = field(default_factory=list)

    @property
    def waiting(self) -> list[Request]:
        return [*self.costs, *self.returned]

    def add(self, request: Request) -> None:
        assert request.expected_output_len is not None
        self._enter(request, request.num_prompt_tokens + request.expected_output_len)
        self.queues[request.user].append(request)

    def requeue(self, request: Request) -> None:
        self.returned = sorted([*self.returned, request], key=lambda r: r.number)

    def _enter(self, request: Request, cost: int) -> None:
        self.costs[request] = cost
        if request.user not in self.users:
            self.users.append(request.user)
            self.queues[request.user] = []
            self.deficits[request.user] = 0

    def _can_pay(self) -> bool:
        return self.granted and self.costs[self.queues[self.users[0]][0]] <= self.deficits[self.users[0]]

    def peek(self) -> Request:
        if self.returned:
            return self.returned[0]
        while not self._can_pay():
            if self.granted:
                self.users.append(self.users.pop(0))
            self.deficits[self.users[0]] += self.quantum
            self.granted = True
        return self.queues[self.users[0]][0]

    def admitted(self, request: Request) -> None:
        if request not in self.returned:
            self.deficits[request.user] -= self.costs[request]
        self.remove(request)

    def remove(self, request: Request) -> None:
        if request in self.returned:
            self.returned.remove(request)
            return
        user = request.user
        del self.costs[request]
        self.queues[user].remove(request)
        if not self.queues[user]:
            if user == self.users[0]:
                self.granted = False
            self.users.remove(user)


INDEX = st.integers(0, 30)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6), st.integers(-2, 2), st.sampled_from("abc"), st.integers(0, 9)),
        st.tuples(st.just("add"), st.integers(1, 6), st.integers(-2, 2), st.sampled_from("abc"), st.integers(0, 9)),
        st.tuples(st.just("admit")),
        st.tuples(st.just("abort"), INDEX),
        st.tuples(st.just("requeue"), INDEX, st.integers(0, 5)),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 1.0, 3.0])),
        st.tuples(st.just("cache"), INDEX, st.integers(0, 4)),
        st.tuples(st.just("look")),
    ),
    min_size=25,
    max_size=70,
)


def follow(engine: FakeEngine, model: SortedModel | RoundRobinModel, operations: Sequence[tuple[Any, ...]]) -> None:
    """Do the same to the engine's queue and to the model; they must agree at each look."""
    queue = queue_of(engine)
    running: list[Request] = []
    for name, *values in [*operations, ("look",)]:
        if name == "add":
            output_len, priority, user, prompt_len = values
            request = engine.request(output_len, prompt_len, priority=priority, user=user)
            queue.add(request)
            model.add(request)
        elif name == "requeue" and running:
            request = running.pop(values[0] % len(running))
            generate(request, values[1])
            queue.requeue(request)
            model.requeue(request)
        elif name == "wait":
            engine.time += values[0]
        elif name == "cache" and model.waiting:
            engine.cached[model.waiting[values[0] % len(model.waiting)]] = values[1]
        elif name == "abort" and model.waiting:
            request = model.waiting[values[0] % len(model.waiting)]
            queue.remove(request)
            model.remove(request)
        elif name == "look" and model.waiting:
            assert queue.peek() is model.peek()
            assert queue.peek() is model.peek(), "a look changes nothing"
        elif name == "admit" and model.waiting:
            request = admit(queue)
            assert request is model.peek()
            model.admitted(request)
            running.append(request)
        assert len(queue) == len(model.waiting)
        assert sorted(r.number for r in queue) == sorted(r.number for r in model.waiting)
    while model.waiting:
        request = admit(queue)
        assert request is model.peek()
        model.admitted(request)
    assert not queue


@pytest.mark.parametrize("policy", ["fcfs", *AGING])
@given(operations=OPERATIONS, aging_s=st.sampled_from([None, 1.0, 3.0, 10.0]))
def test_orders_agree_with_sorting(policy: str, operations: list[tuple[Any, ...]], aging_s: float | None) -> None:
    engine = FakeEngine(scheduling_policy=policy, aging_s=None if policy == "fcfs" else aging_s)
    follow(engine, SortedModel(engine), operations)


@given(operations=OPERATIONS, quantum=st.integers(1, 20))
def test_fair_agrees_with_round_robin_quantum_by_quantum(operations: list[tuple[Any, ...]], quantum: int) -> None:
    follow(FakeEngine(scheduling_policy="fair", fair_quantum=quantum), RoundRobinModel(quantum), operations)


# how long a request may wait


def overtaken(queue: QueuePolicy, engine: FakeEngine, victim: Request, preferred: Callable[[], Request]) -> int:
    """One preferred request arrives and one request is admitted every second: how many go before the victim."""
    queue.add(victim)
    for count in range(300):
        queue.add(preferred())
        if admit(queue) is victim:
            return count
        engine.time += 1.0
    return 300


def against(policy: str, **config: Any) -> int:
    """How many requests of a stream that the policy likes go before one that it does not like."""
    engine, queue = make(policy, **config)
    victim = engine.request(output_len=50, priority=5)

    def preferred() -> Request:
        request = engine.request(output_len=2, priority=0)
        engine.cached[request] = 16
        return request

    return overtaken(queue, engine, victim, preferred)


@pytest.mark.parametrize("policy", AGING)
def test_aging_ends_starvation(policy: str) -> None:
    assert against(policy, aging_s=NEVER) == 300, "the stream starves the victim"
    assert against(policy, aging_s=10.0) == 10, "one admission a second until it has aged"


def test_priority_ages_unasked_and_the_others_do_not() -> None:
    assert {policy: against(policy) for policy in AGING} == {
        "priority": 60,
        "sjf": 300,
        "srpt": 300,
        "longest_prefix_match": 300,
    }


def test_fcfs_lets_nobody_pass() -> None:
    assert against("fcfs") == 0


@pytest.mark.parametrize("policy", AGING)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.floats(0, 3)), min_size=2, max_size=40),
    data=st.data(),
)
def test_no_later_arrival_passes_an_aged_request(
    policy: str, arrivals: list[tuple[int, int, float]], data: st.DataObject
) -> None:
    """Random arrivals, one admission after each second one: from its age on only earlier arrivals pass."""
    engine, queue = make(policy, aging_s=5.0)
    waiting: list[Request] = []
    for output_len, priority, gap in arrivals:
        engine.time += gap
        waiting.append(engine.request(output_len, priority=priority))
        engine.cached[waiting[-1]] = data.draw(st.integers(0, 3))
        queue.add(waiting[-1])
        if len(waiting) % 2 == 0:
            chosen = admit(queue)
            waiting.remove(chosen)
            for request in waiting:
                if engine.time - request.metrics.arrival_time >= 5.0:
                    assert chosen.number < request.number


COSTS = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def cost_of(request: Request) -> int:
    assert request.expected_output_len is not None
    return request.num_prompt_tokens + request.expected_output_len


def flood(policy: str, flooding: list[int], progress: int, own: list[int], **config: Any) -> tuple[int, list[int]]:
    """`a` floods the queue, `progress` requests are admitted, then `b` asks for `own` costs, and `a` for more.

    Returns the largest cost, and what `a` was charged from then on before each request of `b` was admitted.
    """
    engine, queue = make(policy, **config)

    def add(user: str, cost: int) -> None:
        queue.add(engine.request(output_len=cost // 2, prompt_len=cost - cost // 2, user=user))

    for cost in flooding * 2:
        add("a", cost)
    for _ in range(progress % len(flooding)):
        admit(queue)
    for cost in own:
        add("b", cost)
    charged, before = 0, []
    while len(before) < len(own):
        for cost in flooding:  # `a` never runs dry
            add("a", cost)
        request = admit(queue)
        if request.user == "b":
            before.append(charged)
        else:
            charged += cost_of(request)
    return max(*flooding, *own), before


@given(flooding=COSTS, progress=st.integers(0, 29), own=COSTS, quantum=st.integers(1, 100))
def test_fair_bounds_the_wait_behind_a_flood(flooding: list[int], progress: int, own: list[int], quantum: int) -> None:
    largest, before = flood("fair", flooding, progress, own, fair_quantum=quantum)
    for place, charged in enumerate(before):
        asked = sum(own[: place + 1])
        assert charged < math.ceil(asked / quantum) * quantum + largest


def test_first_come_first_served_does_not_bound_it() -> None:
    flooding, own = [40] * 30, [10]
    largest, before = flood("fair", flooding, 0, own, fair_quantum=20)
    assert before[0] <= 20 + largest
    assert flood("fcfs", flooding, 0, own)[1] == [2 * sum(flooding)]


@given(a=COSTS, b=COSTS, quantum=st.integers(1, 100))
def test_fair_shares_tokens_within_a_quantum_and_a_request(a: list[int], b: list[int], quantum: int) -> None:
    engine, queue = make("fair", fair_quantum=quantum)
    waiting = {"a": len(a), "b": len(b)}
    for user, costs in (("a", a), ("b", b)):
        for cost in costs:
            queue.add(engine.request(output_len=cost // 2, prompt_len=cost - cost // 2, user=user))
    charged = {"a": 0, "b": 0}
    while all(waiting.values()):
        request = admit(queue)
        waiting[request.user] -= 1
        charged[request.user] += cost_of(request)
        if all(waiting.values()):
            assert abs(charged["a"] - charged["b"]) < quantum + max(*a, *b)
