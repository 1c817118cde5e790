"""Copies, swaps and poison against the same moves in numpy: bit for bit, in the plan's order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned_requests import plan

from paged_jax.execution.page_moves import PageMoves
from paged_jax.execution.plan import Swap

NUM_BLOCKS, NUM_HOST_BLOCKS = 30, 24
LAYERS = (2, 3)
SHAPES = ((4, 2, 8), (4, 6, 16))
"""One layer's page of one block, per cache group."""
DTYPES = ["float32", "bfloat16"]


def bits(pages) -> list[np.ndarray]:
    """The pages of each group by layer and block, as integers, so that NaN equals itself; the null block, which
    padding writes to, as zeros."""
    arrays = [np.asarray(group) for group in pages]
    views = [a.view({2: np.uint16, 4: np.uint32}[a.itemsize]) for a in arrays]
    blocks = [v.reshape(layers, -1, *v.shape[1:]).copy() for v, layers in zip(views, LAYERS, strict=True)]
    for group in blocks:
        group[:, 0] = 0
    return blocks


def random_pages(seed: int, dtype: str, num_blocks: int = NUM_BLOCKS) -> tuple[jax.Array, ...]:
    """Pages of two groups in every bit pattern, NaN and infinities included."""
    rng = np.random.default_rng(seed)
    size = jnp.dtype(dtype).itemsize
    return tuple(
        jnp.asarray(
            rng.integers(0, 256, (layers * (1 + num_blocks), *shape[:-1], shape[-1] * size), np.uint8).view(
                jnp.dtype(dtype)
            )
        )
        for layers, shape in zip(LAYERS, SHAPES, strict=True)
    )


def make_moves(pages, **options) -> PageMoves:
    settings = {"blocks_per_layer": 1 + NUM_BLOCKS, "largest": NUM_HOST_BLOCKS}
    return PageMoves(pages, **{**settings, "debug": False, **options})


def run(moves: PageMoves, pages, made) -> list[jax.Array]:
    moved = list(pages)
    moves.run(moved, made)
    return moved


def swap(device_blocks, host_blocks) -> Swap:
    """The request plays no part: the blocks say all."""
    return Swap(None, tuple(map(tuple, device_blocks)), tuple(map(tuple, host_blocks)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1), (5, 0), (0, 3), (7, 10), (24, 13)])
def test_a_swap_there_and_back_is_bit_exact(sizes, dtype):
    """To other blocks than it came from, in another order; what it left behind has been overwritten since."""
    pages = random_pages(0, dtype)
    before = bits(pages)
    moves = make_moves(pages)
    rng = np.random.default_rng(1)
    sources = [1 + rng.permutation(NUM_BLOCKS)[:n] for n in sizes]
    targets = [1 + rng.permutation(NUM_BLOCKS)[:n] for n in sizes]
    host = [rng.permutation(NUM_HOST_BLOCKS)[:n] for n in sizes]
    pages = run(moves, pages, plan(swap_outs=[swap(sources, host)]))
    for after, same in zip(bits(pages), before, strict=True):
        np.testing.assert_array_equal(after, same)
    other = random_pages(2, dtype)
    expected = bits(other)
    pages = run(moves, other, plan(swap_ins=[swap(targets, host)]))
    for group, after in enumerate(bits(pages)):
        expected[group][:, targets[group]] = before[group][:, sources[group]]
        np.testing.assert_array_equal(after, expected[group])


@pytest.mark.parametrize(("count", "largest", "pieces"), [(63, 200, 1), (64, 64, 1), (65, 200, 1), (191, 64, 3)])
def test_a_request_moves_in_one_gather_and_one_scatter_but_for_giants(count, largest, pieces, monkeypatch):
    pages = random_pages(0, "float32", num_blocks=count)
    before = bits(pages)
    moves = make_moves(pages, blocks_per_layer=1 + count, largest=largest)
    blocks, host = range(1, 1 + count), range(count)
    used = []
    program = moves._program
    monkeypatch.setattr(moves, "_program", lambda *move: (used.append(move[:2]), program(*move))[1])
    pages = run(moves, pages, plan(swap_outs=[swap([blocks] * 2, [host] * 2)]))
    pages = run(moves, pages, plan(swap_ins=[swap([blocks[::-1]] * 2, [host] * 2)]))
    for kind in ("gather", "scatter"):
        assert [used.count((kind, group)) for group in range(2)] == [pieces] * 2
    for after, same in zip(bits(pages), before, strict=True):
        np.testing.assert_array_equal(after[:, :0:-1], same[:, 1:])


class Model:
    """The plan's order of moves written down in numpy, with a host memory that is one array."""

    def __init__(self, pages, debug: bool) -> None:
        self.pages = bits(pages)
        self.host = [np.zeros((g.shape[0], NUM_HOST_BLOCKS, *g.shape[2:]), g.dtype) for g in self.pages]
        nan = np.asarray(jnp.full(1, jnp.nan, pages[0].dtype))
        self.nan = nan.view(self.pages[0].dtype)[0] if debug else None

    def run(self, made) -> None:
        leaving = [[pages[:, list(s.device_blocks[g])] for g, pages in enumerate(self.pages)] for s in made.swap_outs]
        for s, blocks in zip(made.swap_outs, leaving, strict=True):
            for g, host in enumerate(self.host):
                host[:, list(s.host_blocks[g])] = blocks[g]
        for g, pages in enumerate(self.pages):
            sources = [pages[:, source].copy() for source, _ in made.copies[g]]
            for (_, target), block in zip(made.copies[g], sources, strict=True):
                pages[:, target] = block
            targets = {target for _, target in made.copies[g]}
            if self.nan is not None:
                pages[:, [b for b in made.emptied_blocks[g] if b not in targets]] = self.nan
        for s in made.swap_ins:
            for g, pages in enumerate(self.pages):
                pages[:, list(s.device_blocks[g])] = self.host[g][:, list(s.host_blocks[g])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("debug", [False, True])
def test_random_plans_do_what_they_do_in_numpy(dtype, debug):
    """Everything at once, in the same plan: blocks of a request that is swapped out are targets of copies and of
    swaps in, some requests come back at once, host blocks of an aborted one are taken by another.
    """
    rng = np.random.default_rng(7)
    pages = random_pages(3, dtype)
    model, moves = Model(pages, debug), make_moves(pages, debug=debug)
    swapped: list[list[np.ndarray]] = []  # host blocks of each request, per group
    returned = chained = aborted = 0
    for _ in range(40):
        coming = [swapped.pop(rng.integers(len(swapped))) for _ in range(rng.integers(0, 1 + min(2, len(swapped))))]
        if swapped and rng.random() < 0.2:
            swapped.pop()  # aborted: nobody tells the executor
            aborted += 1
        outs, copies, emptied, ins = [], [], [], []
        held = [[b for request in swapped + coming for b in request[g]] for g in range(2)]
        free_host = [rng.permutation(np.setdiff1d(np.arange(NUM_HOST_BLOCKS), held[g])) for g in range(2)]
        leaving = [rng.permutation(np.arange(1, 1 + NUM_BLOCKS)) for _ in range(2)]
        for i in range(rng.integers(0, 3)):
            sizes = [min(rng.integers(0, 8), len(free_host[g]) - 8 * i) for g in range(2)]
            if min(sizes) < 0 or sum(sizes) == 0:
                continue
            host = [free_host[g][8 * i : 8 * i + sizes[g]] for g in range(2)]
            outs.append(swap([leaving[g][8 * i : 8 * i + sizes[g]] for g in range(2)], host))
            if rng.random() < 0.3:
                coming.append(host)
                returned += 1
            else:
                swapped.append(host)
        for g in range(2):
            targets = list(rng.permutation(leaving[g])[: rng.integers(0, 12)])
            copies.append(tuple((int(rng.integers(1, 1 + NUM_BLOCKS)), int(t)) for t in targets))
            chained += bool({s for s, _ in copies[g]} & {t for _, t in copies[g]})
            emptied.append(tuple(rng.permutation(leaving[g])[: rng.integers(0, 10)].tolist()))
        for request in coming:
            into = [[b for b in rng.permutation(leaving[g]) if b not in {t for _, t in copies[g]}] for g in range(2)]
            # two requests never come to the same blocks
            taken = [{b for s in ins for b in s.device_blocks[g]} for g in range(2)]
            into = [[b for b in into[g] if b not in taken[g]] for g in range(2)]
            ins.append(swap([into[g][: len(request[g])] for g in range(2)], request))
        made = plan(swap_outs=outs, copies=tuple(copies), emptied_blocks=tuple(emptied), swap_ins=ins)
        model.run(made)
        pages = run(moves, pages, made)
        for after, expected in zip(bits(pages), model.pages, strict=True):
            np.testing.assert_array_equal(after[:, 1:], expected[:, 1:])  # the null block may hold anything
    assert min(returned, chained, aborted) > 2, "the cases that matter did not come up"


def test_host_memory_is_let_go_when_its_blocks_are_taken():
    """A request that was aborted while it was swapped out leaves nothing behind once its host blocks are reused."""
    pages = random_pages(0, "float32")
    moves = make_moves(pages)
    pages = run(moves, pages, plan(swap_outs=[swap([[1, 2, 3], [1]], [[0, 1, 2], [5]])]))
    pages = run(moves, pages, plan(swap_outs=[swap([[4], [4]], [[2], [3]])]))
    assert [sorted(group) for group in moves._swapped] == [[(2,)], [(3,), (5,)]]
    run(moves, pages, plan(swap_ins=[swap([[9], [9]], [[2], [3]])]))
    assert [sorted(group) for group in moves._swapped] == [[], [(5,)]]


def test_swapped_pages_are_in_host_memory():
    pages = random_pages(0, "float32")
    moves = make_moves(pages)
    run(moves, pages, plan(swap_outs=[swap([[1, 2, 3], [1]], [[0, 1, 2], [5]])]))
    kinds = {piece.sharding.memory_kind for group in moves._swapped for held in group.values() for piece in held}
    assert kinds == {"pinned_host"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_move_makes_anything_of_the_pages_size(dtype):
    """Beside 64 MB of pages; all programs that write have the pages back in their own buffer."""
    size = jnp.dtype(dtype).itemsize
    blocks_per_layer = (64 << 20) // (2 * 64 * size)
    pages = (jnp.zeros((2 * blocks_per_layer, 4, 2, 8), dtype),)
    moves = make_moves(pages, blocks_per_layer=blocks_per_layer, largest=1000, debug=True)
    moves.compile()
    assert {move.kind for move in moves.programs} == {"gather", "scatter", "poison"}
    for move in moves.programs:
        memory = moves.programs[move].memory_analysis()
        assert memory.temp_size_in_bytes < pages[0].nbytes / 64, move
        if move.kind == "gather":
            assert memory.output_size_in_bytes < pages[0].nbytes / 64
        else:
            assert memory.alias_size_in_bytes >= pages[0].nbytes, move
