"""A plan while it is made."""

from dataclasses import dataclass, field

from paged_jax.engine.request import Request
from paged_jax.execution.plan import ScheduledRequest, Swap


@dataclass(slots=True)
class Draft:
    """Who takes part in a step so far, and how many tokens of its budget are left."""

    budget: int
    """Tokens that may still be planned."""
    counts_decodes: bool = False
    """Whether the budget is already less by the decodes."""
    decodes: list[Request] = field(default_factory=list)
    chunks: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing would be computed."""
        return not self.decodes and not self.chunks

    def charge_decodes(self) -> None:
        """Take the decodes' tokens out of the budget, now and from now on."""
        self.budget -= len(self.decodes)
        self.counts_decodes = True

    def cut_decodes(self) -> None:
        """Let decodes pause that the budget has nothing left for."""
        del self.decodes[max(0, self.budget) :]
        self.charge_decodes()

    def add(self, request: Request, count: int) -> None:
        """Plan the next `count` tokens of a request."""
        start = request.num_computed_tokens
        samples = start + count == len(request.token_ids)
        if samples and count == 1:
            self.decodes.append(request)
            self.budget -= self.counts_decodes
        else:
            self.budget -= count
            self.chunks.append(ScheduledRequest(request, start, count, samples))

    def withdraw(self, request: Request) -> None:
        """Take back what was planned of a request, if anything was."""
        if request in self.decodes:
            self.decodes.remove(request)
            self.budget += self.counts_decodes
        for part in [part for part in self.chunks if part.request is request]:
            self.chunks.remove(part)
            self.budget += part.num_tokens
