"""What a prefix cache knows, drawn as the tree of prefixes that it is."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from paged_jax.kv_cache.block_pool import BlockPool
from paged_jax.kv_cache.prefix_cache import CachedRun, PrefixCache

_GAP = 0.6
"""Between a run and what follows it, in token slots."""


def draw_prefix_tree(
    cache: PrefixCache,
    pool: BlockPool,
    ax: Axes,
    label: Callable[[int], str] = str,
    *,
    notes: Mapping[int, str] | None = None,
) -> None:
    """The tree from left to right: a box is a block with its tokens, its number above; boxes that touch are one run.

    Grey blocks are in use (with their number of users), white ones may be given up. `notes` are written beside the
    numbers of blocks.
    """
    runs = cache.runs()
    children: dict[int | None, list[int]] = {}
    for number, run in enumerate(runs):
        children.setdefault(run.parent, []).append(number)
    places: list[tuple[float, float]] = [(0.0, 0.0)] * len(runs)
    size, leaves, width = cache.block_size, 0, 0.0

    def place(number: int, x: float) -> float:
        nonlocal leaves, width
        end = x + size * len(runs[number].block_ids)
        width = max(width, end)
        below = [place(child, end + _GAP) for child in children.get(number, ())]
        if below:
            y = (below[0] + below[-1]) / 2
        else:
            y, leaves = float(leaves), leaves + 1
        places[number] = (x, y)
        return y

    tops = [place(number, _GAP) for number in children.get(None, ())]
    root = (0.0, (tops[0] + tops[-1]) / 2 if tops else 0.0)
    for number, run in enumerate(runs):
        x, y = places[number]
        before = root
        if run.parent is not None:
            px, py = places[run.parent]
            before = (px + size * len(runs[run.parent].block_ids), py)
        ax.plot([before[0], x], [before[1], y], color="black", linewidth=0.8, zorder=1)
        _draw_run(run, pool, ax, x, y, size, label, notes or {})
    ax.plot(*root, "o", color="black", markersize=4)
    ax.set(xlim=(-0.3, max(width, 1.0) + 0.2), ylim=(max(leaves, 1) - 0.5, -0.65), xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    if not runs:
        ax.text(0.4, 0, "empty", va="center", style="italic")


def _draw_run(
    run: CachedRun,
    pool: BlockPool,
    ax: Axes,
    x: float,
    y: float,
    size: int,
    label: Callable[[int], str],
    notes: Mapping[int, str],
) -> None:
    for index, block in enumerate(run.block_ids):
        left, users = x + index * size, pool.ref_count(block)
        fill = "0.82" if users else "white"
        ax.add_patch(Rectangle((left, y - 0.22), size, 0.44, facecolor=fill, edgecolor="black", linewidth=0.9))
        tokens: Sequence[int] = run.token_ids[index * size : (index + 1) * size]
        for slot, token in enumerate(tokens):
            ax.text(left + slot + 0.5, y, label(token), ha="center", va="center", fontsize=7)
        words = [f"block {block}", f"({users} user{'s' * (users > 1)})" if users else "", notes.get(block, "")]
        ax.text(left + 0.05, y - 0.26, " ".join(filter(None, words)), ha="left", va="bottom", fontsize=6)
