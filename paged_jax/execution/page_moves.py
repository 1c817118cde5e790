"""Moves of whole blocks between steps: copies, swaps to host memory and back, and poison for debugging."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from paged_jax.execution.plan import SchedulerOutput, Swap
from paged_jax.execution.programs import Programs
from pallas_kernels.kv_pages import gather_pages, scatter_pages

POISON_PIECE = 64
"""Blocks that are poisoned at a time."""

type Kind = Literal["gather", "scatter", "poison"]


class Move(NamedTuple):
    """Names a program: what it does, to the pages of which cache group, with how many blocks."""

    kind: Kind
    group: int
    num_blocks: int


class PageMoves:
    """The compiled programs that move blocks, and the pages that are in host memory.

    Pages are donated to all programs that write to them.
    """

    def __init__(self, pages: Sequence[jax.Array], *, blocks_per_layer: int, largest: int, debug: bool) -> None:
        """Up to `largest` blocks move in one gather and one scatter; `debug` poisons emptied blocks."""
        self._shapes = [jax.ShapeDtypeStruct(group.shape, group.dtype) for group in pages]
        self._device = [group.sharding for group in pages]
        self._host = [group.sharding.with_memory_kind(_host_memory(group)) for group in pages]
        self._swapped: list[dict[tuple[int, ...], list[jax.Array]]] = [{} for _ in pages]
        self._blocks_per_layer = blocks_per_layer
        # powers of two and half-way between: at most a third of what moves, and is kept on the host, is padding
        powers = [2**i for i in range((largest - 1).bit_length() + 1)]
        self._sizes = sorted({*powers, *(3 * power // 2 for power in powers[1:-1])})
        self._debug = debug
        self.programs = Programs(self._lower)

    def compile(self) -> None:
        """Compile every program that a plan may need."""
        moves: list[Move] = []
        for group in range(len(self._shapes)):
            moves += [Move("gather", group, size) for size in self._sizes]
            moves += [Move("scatter", group, size) for size in self._sizes]
            moves += [Move("poison", group, POISON_PIECE)] if self._debug else []
        self.programs.compile(moves)

    def run(self, pages: list[jax.Array], plan: SchedulerOutput) -> None:
        """Do what the plan wants done before its step, in the plan's order, to the pages in place.

        Interrupted, it leaves pages that are valid arrays, of which nobody knows how far they came.
        """
        for swap in plan.swap_outs:
            self._swap_out(pages, swap)
        for group, copies in enumerate(plan.copies):
            if copies:
                sources, targets = zip(*copies, strict=True)
                self._scatter(pages, group, targets, self._gather(pages, group, sources))
        if self._debug:
            for group, emptied in enumerate(plan.emptied_blocks):
                targets = {target for _, target in plan.copies[group]} if plan.copies else set()
                self._poison(pages, group, [b for b in emptied if b not in targets])
        for swap in plan.swap_ins:
            self._swap_in(pages, swap)

    def _swap_out(self, pages: Sequence[jax.Array], swap: Swap) -> None:
        for group, (blocks, host_blocks) in enumerate(zip(swap.device_blocks, swap.host_blocks, strict=True)):
            pieces = [jax.device_put(piece, self._host[group]) for piece in self._gather(pages, group, blocks)]
            # whoever held some of these host blocks has been given up
            reused, held = set(host_blocks), self._swapped[group]
            self._swapped[group] = {ids: theirs for ids, theirs in held.items() if reused.isdisjoint(ids)}
            if host_blocks:
                self._swapped[group][host_blocks] = pieces

    def _swap_in(self, pages: list[jax.Array], swap: Swap) -> None:
        for group, (blocks, host_blocks) in enumerate(zip(swap.device_blocks, swap.host_blocks, strict=True)):
            pieces = self._swapped[group].pop(host_blocks) if host_blocks else []
            self._scatter(pages, group, blocks, [jax.device_put(piece, self._device[group]) for piece in pieces])

    def _gather(self, pages: Sequence[jax.Array], group: int, blocks: Sequence[int]) -> list[jax.Array]:
        """Read blocks of all layers, in pieces."""
        return [self._program("gather", group, ids)(pages[group], ids) for ids in self._cut(blocks)]

    def _scatter(self, pages: list[jax.Array], group: int, blocks: Sequence[int], pieces: Sequence[jax.Array]) -> None:
        """Write what `_gather` read of as many blocks."""
        for ids, piece in zip(self._cut(blocks), pieces, strict=True):
            pages[group] = self._program("scatter", group, ids)(pages[group], ids, piece)

    def _poison(self, pages: list[jax.Array], group: int, blocks: Sequence[int]) -> None:
        """Fill blocks that hold nothing with NaN, so that a read of one cannot go unseen."""
        for first in range(0, len(blocks), POISON_PIECE):
            ids = _padded(blocks[first : first + POISON_PIECE], POISON_PIECE)
            pages[group] = self._program("poison", group, ids)(pages[group], ids)

    def _cut(self, blocks: Sequence[int]) -> Iterator[np.ndarray]:
        """The block ids in as few pieces as there are programs for: the same cut for the same number of blocks.

        Each is padded to the next such number, so that a few programs move any number of blocks; host memory as well.
        """
        largest = self._sizes[-1]
        for first in range(0, len(blocks), largest):
            piece = blocks[first : first + largest]
            yield _padded(piece, next(size for size in self._sizes if size >= len(piece)))

    def _program(self, kind: Kind, group: int, ids: np.ndarray) -> jax.stages.Compiled:
        return self.programs[Move(kind, group, len(ids))]

    def _lower(self, move: Move) -> jax.stages.Lowered:
        pages, layers = self._shapes[move.group], self._blocks_per_layer
        ids = jax.ShapeDtypeStruct((move.num_blocks,), jnp.int32)
        if move.kind == "gather":
            return jax.jit(partial(gather_pages, blocks_per_layer=layers)).lower(pages, ids)
        if move.kind == "poison":
            return jax.jit(partial(_poison, blocks_per_layer=layers), donate_argnums=0).lower(pages, ids)
        blocks = jax.ShapeDtypeStruct((pages.shape[0] // layers, *ids.shape, *pages.shape[1:]), pages.dtype)
        return jax.jit(partial(scatter_pages, blocks_per_layer=layers), donate_argnums=0).lower(pages, ids, blocks)


def _padded(block_ids: Sequence[int], size: int) -> np.ndarray:
    """The ids and then the null block's, which anything may be written to: nobody reads it."""
    padded = np.zeros(size, np.int32)
    padded[: len(block_ids)] = block_ids
    return padded


def _poison(
    pages: Shaped[Array, "N B KV D"], block_ids: Int[Array, "P"], *, blocks_per_layer: int
) -> Shaped[Array, "N B KV D"]:
    layers = pages.shape[0] // blocks_per_layer
    blocks = jnp.full((layers, block_ids.shape[0], *pages.shape[1:]), jnp.nan, pages.dtype)
    return scatter_pages(pages, block_ids, blocks, blocks_per_layer=blocks_per_layer)


def _host_memory(pages: jax.Array) -> str:
    """The kind of host memory that the pages' device copies to: pinned where it has it."""
    (device,) = pages.sharding.device_set
    kinds = {memory.kind for memory in device.addressable_memories()}
    return "pinned_host" if "pinned_host" in kinds else "unpinned_host"
