"""The figure of a run: achieved speed under the device's roofs, and the share of the copy bandwidth by size."""

from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.bench.report import Summary, split

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # Okabe and Ito
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw(summaries: Sequence[Summary], directory: Path) -> list[Path]:
    """Write roofline.png and .pdf, of default tiles, or of all where those were not timed; returns the files.

    Raises ModuleNotFoundError where matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    attention, roofs = split(summaries)
    attention = [s for s in attention if s.setting["tiles"] is None] or attention
    copy, matmul = roofs["copy"].bytes_per_s, roofs["matmul"].flops_per_s
    directory.mkdir(parents=True, exist_ok=True)
    with rc_context(
        {"font.size": 8, "legend.fontsize": 6, "pdf.fonttype": 42, "axes.grid": True, "grid.color": "0.85"}
    ):
        figure = Figure(figsize=(3.3, 4.8), layout="constrained")
        roof, share = figure.subplots(2)
        intensities = [s.flops / s.bytes for s in attention]
        xs = [min(intensities) / 8, matmul / copy, 8 * max(*intensities, matmul / copy)]
        roof.loglog(xs, [min(copy * x, matmul) / 1e9 for x in xs], color="black", linewidth=1.1)
        roof.set_xlabel("operations per byte")
        roof.set_ylabel("GFLOP/s")
        share.set_xscale("log", base=2)
        share.set_xlabel("bytes of a call (MB)")
        share.set_ylabel("share of the copy bandwidth (%)")
        kinds = list(dict.fromkeys(map(_kind, attention)))
        for i, kind in enumerate(kinds):
            own = sorted((s for s in attention if _kind(s) == kind), key=lambda s: s.bytes)
            style = {
                "color": _COLOURS[i % len(_COLOURS)],
                "marker": _MARKERS[i % len(_MARKERS)],
                "markersize": 3.5,
                "markerfacecolor": "white" if i >= len(_COLOURS) else _COLOURS[i % len(_COLOURS)],
            }
            roof.plot([s.flops / s.bytes for s in own], [s.flops_per_s / 1e9 for s in own], linestyle="", **style)
            heights = [100 * s.bytes_per_s / copy for s in own]
            share.plot([s.bytes / 1e6 for s in own], heights, label=kind, linewidth=1, **style)
        share.set_ylim(bottom=0)
        share.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
        written = [directory / f"roofline{suffix}" for suffix in (".png", ".pdf")]
        for path in written:
            figure.savefig(path, dpi=200)
    return written


def _kind(summary: Summary) -> str:
    """What gets a marker and a line of its own."""
    name, page = summary.setting["implementation"], summary.setting["page_size"]
    return name if page is None or name == "contiguous" else f"{name}, page {page}"
