"""Block tables and the block pool of a live engine, step by step."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request

FILLS = ("#9ECAE9", "#F8C471", "#E3B5D3", "#A9DFBF", "#F5EFA0", "#D5C4F0")
"""Pale enough for black letters, and of different greys."""
_IN_INCHES = 0.34
"""Height of a row of blocks."""
_SLOT_IN_INCHES = 0.42
"""Least width of a slot with a word in it."""


class Block(NamedTuple):
    """One block of the pool."""

    owners: tuple[str, ...]
    """Requests whose block tables name it; none: it is cached or free."""
    token_ids: tuple[int, ...]
    """Of its slots, from the first, those that hold keys and values."""
    is_cached: bool
    """Whether the prefix cache knows its content."""


class Memory(NamedTuple):
    """The memory of one cache group at one moment."""

    block_size: int
    blocks: tuple[Block, ...]
    """Block number 1 first."""
    tables: dict[str, tuple[int, ...]]
    """Block table of each running request; 0 stands for a block that a sliding window has left behind."""


def name_of(request: Request) -> str:
    """`id`, or `id/2` for a sample or beam."""
    return f"{request.request_id}/{request.sample_index}" if request.sample_index else request.request_id


def look(engine: Engine, group: int = 0) -> Memory:
    """What the memory of a cache group holds now, between two steps.

    A request's newest token is not in it: its keys and values are computed by the next step.
    """
    size, kv_cache = engine.config.block_size, engine.scheduler.kv_cache
    requests = sorted([*engine.scheduler.running, *engine.scheduler.ended_rows], key=lambda r: r.number)
    cached = {
        block: tokens
        for run in kv_cache.caches[group].runs()
        for block, tokens in zip(run.block_ids, _pieces(run.token_ids, size), strict=True)
    }
    owners: dict[int, list[str]] = {}
    contents: dict[int, Sequence[int]] = dict(cached)
    for request in requests:
        table = request.block_tables[group].block_ids
        known = _pieces(request.token_ids[: request.num_computed_tokens], size)
        for index, block in enumerate(table):
            owners.setdefault(block, []).append(name_of(request))
            if index < len(known):
                contents[block] = known[index]
    blocks = tuple(
        Block(tuple(owners.get(block, ())), tuple(contents.get(block, ())), block in cached)
        for block in range(1, engine.num_blocks + 1)
    )
    return Memory(size, blocks, {name_of(r): tuple(r.block_tables[group].block_ids) for r in requests})


def draw_memory(moments: Mapping[str, Memory], label: Callable[[int], str] = str, *, columns: int = 4) -> Figure:
    """A row for each moment, named by its key: block tables on the left, the pool with its tokens on the right.

    `label` writes a token id, `columns` is the number of blocks in a row of the pool. To be called under
    `plots.STYLE`, as all drawings are.
    """
    names = list(dict.fromkeys(name for memory in moments.values() for name in memory.tables))
    fills = {name: FILLS[i % len(FILLS)] for i, name in enumerate(names)}
    heights = [max(_rows(memory, columns), len(memory.tables)) for memory in moments.values()]
    size = next(iter(moments.values())).block_size
    longest = max(1, max((len(t) for m in moments.values() for t in m.tables.values()), default=1))
    pool_in, tables_in = columns * size * _SLOT_IN_INCHES, 0.8 + 0.25 * longest
    figure = Figure(figsize=(pool_in + tables_in, sum(_IN_INCHES * (h + 1.3) for h in heights)), layout="constrained")
    axes = figure.subplots(len(moments), 2, squeeze=False, width_ratios=(tables_in, pool_in), height_ratios=heights)
    for (title, memory), (left, right) in zip(moments.items(), axes, strict=True):
        rows = max(_rows(memory, columns), len(memory.tables))
        draw_tables(memory, left, fills, width=longest, rows=rows)
        draw_pool(memory, right, fills, label, columns=columns, rows=rows)
        left.set_title(title, loc="left", fontsize=8, fontweight="bold")
    return figure


def draw_tables(memory: Memory, ax: Axes, fills: Mapping[str, str], *, width: int, rows: int) -> None:
    """Each request's block table: the number of the block that holds its first tokens, its next tokens, and so on.

    The picture has room for `rows` tables of `width` blocks.
    """
    for y, (name, table) in enumerate(memory.tables.items()):
        ax.text(-0.3, y + 0.62, name, ha="right", va="center")
        for x, block in enumerate(table):
            ax.add_patch(Rectangle((x, y + 0.32), 1, 0.6, facecolor=fills[name], edgecolor="black", linewidth=0.8))
            ax.text(x + 0.5, y + 0.62, str(block) if block else "-", ha="center", va="center")
    if not memory.tables:
        ax.text(-0.3, 0.62, "nobody runs", ha="left", va="center", style="italic")
    _bare(ax, (-1.6, width + 0.4), (rows + 0.02, 0))


def draw_pool(
    memory: Memory,
    ax: Axes,
    fills: Mapping[str, str],
    label: Callable[[int], str] = str,
    *,
    columns: int = 4,
    rows: int | None = None,
) -> None:
    """All blocks, a box each, with number and owners above and tokens inside; room for `rows` rows of them.

    White slots of a coloured block are internal fragmentation. A dotted block is kept by the prefix cache alone; a
    pale one is free. A block with several owners is striped in their colours.
    """
    size = memory.block_size
    for index, block in enumerate(memory.blocks):
        row, column = divmod(index, columns)
        x, y = column * (size + 0.5), row
        for slot, token in enumerate(block.token_ids):
            colours = [fills[name] for name in block.owners] or ["0.93"]
            for stripe, colour in enumerate(colours):
                high = 0.6 / len(colours)
                hatch = None if block.owners else "...."
                box = Rectangle((x + slot, y + 0.32 + stripe * high), 1, high, facecolor=colour, linewidth=0)
                box.set(hatch=hatch, edgecolor="0.7")
                ax.add_patch(box)
            ax.text(x + slot + 0.5, y + 0.62, label(token), ha="center", va="center", fontsize=7)
        busy = bool(block.token_ids or block.owners)
        edge, width = ("black", 0.9) if block.owners else ("0.35" if busy else "0.75", 0.6)
        for slot in range(1, size):
            ax.plot([x + slot] * 2, [y + 0.32, y + 0.92], color="0.75", linewidth=0.4)
        ax.add_patch(Rectangle((x, y + 0.32), size, 0.6, fill=False, edgecolor=edge, linewidth=width))
        ax.text(x, y + 0.29, str(index + 1), ha="left", va="bottom", fontsize=6, color="black" if busy else "0.6")
        words = ", ".join(block.owners) or ("cached" if block.token_ids else "free")
        ax.text(
            x + size,
            y + 0.29,
            words,
            ha="right",
            va="bottom",
            fontsize=6,
            color="black" if busy else "0.6",
            fontweight="bold" if len(block.owners) > 1 else "normal",
        )
    _bare(ax, (-0.1, columns * (size + 0.5) - 0.4), ((rows or _rows(memory, columns)) + 0.02, 0))


def _rows(memory: Memory, columns: int) -> int:
    return -(-len(memory.blocks) // columns)


def _pieces(token_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [token_ids[start : start + size] for start in range(0, len(token_ids), size)]


def _bare(ax: Axes, xlim: tuple[float, float], ylim: tuple[float, float]) -> None:
    """No ticks, no frame: the picture is not a plot."""
    ax.set(xlim=xlim, ylim=ylim, xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
