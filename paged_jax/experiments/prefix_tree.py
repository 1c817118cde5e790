"""Trees of prefixes, as tree-of-thought search makes them: each request is the path from a root to a leaf."""

from typing import Literal, Self

from pydantic import model_validator

from paged_jax.experiments.lengths import Count, Lengths
from paged_jax.experiments.token_ids import random_ids
from paged_jax.experiments.workload_spec import Streams, WorkloadSpec

_MAX_LEAVES = 1_000_000


class TreeWorkload(WorkloadSpec):
    """Random token ids; one request for each leaf of each tree, whose prompt is all that stands on the way to it.

    Under the root (a problem) each node (a thought) has `branching` children down to `depth`, so that branching ** d
    prefixes of a tree begin a request up to depth d. The order of requests is drawn by the seed.
    """

    kind: Literal["tree"]
    num_trees: Count = 1
    depth: Count
    """Levels of nodes below the root."""
    branching: Count
    """Children of each node that is not a leaf."""
    root: Lengths
    """Tokens of each root."""
    node: Lengths
    """Tokens of each other node."""
    output: Lengths
    """Output tokens of each request."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_requests > _MAX_LEAVES:
            raise ValueError(
                f"num_trees ({self.num_trees}) of depth {self.depth} and branching {self.branching} have more than "
                f"{_MAX_LEAVES} leaves, each a request: lower one of them"
            )
        return self

    @property
    def num_requests(self) -> int:
        """Leaves of all trees."""
        return self.num_trees * self.branching**self.depth


def tree_prompts(spec: TreeWorkload, streams: Streams, vocab_size: int) -> list[tuple[int, ...]]:
    """The path to each leaf, in an order drawn by the seed."""

    def segments(lengths: Lengths, count: int) -> list[tuple[int, ...]]:
        return [random_ids(n, vocab_size, streams.contents) for n in lengths.draw(count, streams.lengths)]

    paths = segments(spec.root, spec.num_trees)
    for _ in range(spec.depth):
        parents = [path for path in paths for _ in range(spec.branching)]
        paths = [parent + own for parent, own in zip(parents, segments(spec.node, len(parents)), strict=True)]
    return [paths[i] for i in streams.structure.permutation(len(paths))]
