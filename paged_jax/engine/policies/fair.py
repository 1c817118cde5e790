"""Equal shares of service for each user."""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from paged_jax.engine.policies import PolicyContext, QueuePolicy
from paged_jax.engine.policies.fcfs import FCFSQueue
from paged_jax.engine.request import Request

DEFAULT_QUANTUM = 512
"""Tokens granted in a round, where the config says nothing."""


class FairQueue(QueuePolicy):
    """Deficit round-robin over users (Shreedhar & Varghese, SIGCOMM 1995); first come, first served within one.

    Users that have requests waiting are visited in turn. A visit grants the quantum Q; then the user's requests are
    admitted as long as what it has been granted pays for them. A request costs its prompt and its predicted output,
    those of its samples included, in tokens. What is left over is kept for the next visit, and lost when nothing of
    the user waits any more. Preempted requests have been paid for, and come before all that are new, in order of
    arrival. Who is aborted while waiting pays nothing.

    Shares: while two users always have requests waiting, from the first of both on, what they have been charged
    differs by less than Q + C, where C is the largest cost of a request.
    Waiting: let a request and those of its user that wait before it cost S together. From its arrival until it is
    admitted, each other user is charged less than ceil(S / Q) * Q + C, however much it asks for.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._quantum = context.config.fair_quantum or DEFAULT_QUANTUM
        self._queues: dict[str, FCFSQueue] = {}
        self._costs: dict[Request, int] = {}
        self._deficits: dict[str, int] = {}
        self._users: deque[str] = deque()
        self._returned = FCFSQueue(context)  # preempted requests
        self._is_visiting = False
        """Whether the first of the users has got its quantum for this visit."""

    def add(self, request: Request) -> None:
        """A new request joins the end of its user's queue."""
        output_len = self.context.predict_output_len(request)
        self._costs[request] = request.num_prompt_tokens + output_len * (1 + len(request.pending_samples))
        self._queue_of(request.user).add(request)

    def requeue(self, request: Request) -> None:
        """A preempted request has been paid for, and is next."""
        self._returned.requeue(request)

    def peek(self) -> Request:
        """The next request of the user that is visited; visits users until one can pay.

        The rounds in which nobody can pay are granted at once, so a small quantum costs no time.
        """
        if self._returned:
            return self._returned.peek()
        payable = self._payable()
        if payable is not None:
            return payable
        if self._is_visiting:
            self._users.rotate(-1)
        rounds = [max(1, self._rounds_to_pay(user)) for user in self._users]
        fewest = min(rounds)
        winner = rounds.index(fewest)
        for place, user in enumerate(self._users):
            self._deficits[user] += self._quantum * (fewest if place <= winner else fewest - 1)
        self._users.rotate(-winner)
        self._is_visiting = True
        return self._queues[self._users[0]].peek()

    def admitted(self, request: Request) -> None:
        """The request is admitted, and paid for unless it was before."""
        if request in self._costs:
            self._deficits[request.user] -= self._costs[request]
        self.remove(request)

    def remove(self, request: Request) -> None:
        """The request waits no more."""
        if request not in self._costs:
            self._returned.remove(request)
            return
        user, queue = request.user, self._queues[request.user]
        del self._costs[request]
        queue.remove(request)
        if not queue:
            self._is_visiting = self._is_visiting and user != self._users[0]
            self._users.remove(user)
            del self._queues[user], self._deficits[user]

    def __len__(self) -> int:
        return len(self._costs) + len(self._returned)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._returned, *self._queues.values())

    def _queue_of(self, user: str) -> FCFSQueue:
        if user not in self._queues:
            self._queues[user] = FCFSQueue(self.context)
            self._deficits[user] = 0
            self._users.append(user)
        return self._queues[user]

    def _payable(self) -> Request | None:
        """The next request, if there is a user that is visited and can pay it."""
        if not self._is_visiting or self._rounds_to_pay(self._users[0]) > 0:
            return None
        return self._queues[self._users[0]].peek()

    def _rounds_to_pay(self, user: str) -> int:
        """How many more quanta its next request takes; 0 or less: none."""
        return -((self._deficits[user] - self._costs[self._queues[user].peek()]) // self._quantum)
