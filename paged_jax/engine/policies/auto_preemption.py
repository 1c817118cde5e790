"""Preemption by whichever is cheaper."""

from paged_jax.engine.policies import PolicyContext, PreemptionPolicy
from paged_jax.engine.policies.held_blocks import num_held_blocks
from paged_jax.engine.request import Request

DEFAULT_SWAP_BLOCK_COST = 4.0
"""Tokens, where the config says nothing."""


class AutoPreemption(PreemptionPolicy):
    """Swap if moving the blocks costs less than computing their tokens again.

    Both costs are in tokens computed: a block that moves out and in again costs `swap_block_cost`, and recomputation
    costs the tokens computed so far. So swap when held blocks * swap_block_cost < computed tokens; equal costs
    recompute, which needs no host memory. With full attention, and blocks full, that is when swap_block_cost is less
    than block_size; a sliding window holds fewer blocks and swaps sooner.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        cost = context.config.swap_block_cost
        self._block_cost = DEFAULT_SWAP_BLOCK_COST if cost is None else cost

    def swaps(self, request: Request) -> bool:
        """Whether its held blocks cost less to move than its computed tokens to compute."""
        return num_held_blocks(request) * self._block_cost < request.num_computed_tokens
