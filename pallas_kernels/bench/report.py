"""The files of a run, the same as those of an experiment, by the standard library alone, and its tables."""

import csv
import io
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOFS = ("copy", "matmul")
"""Trials that are no attention: what the device can do."""
GENERATED = (
    *("config.yaml", "environment.json", "trials.jsonl", "summary.csv", "summary.md", "summary.tex"),
    *("figures/roofline.png", "figures/roofline.pdf"),
)
_COLUMNS = {
    "implementation": "",
    "batch": "",
    "context": "tokens",
    "page": "tokens",
    "tile": "q, keys",
    "time": "µs",
    "spread": "%",
    "bytes/s": "GB/s",
    "of copy": "%",
}


@dataclass(frozen=True)
class Summary:
    """All trials of one point, or of a roof."""

    setting: dict[str, Any]
    """implementation, kernel, batch, context, page_size, tiles."""
    trials: int
    calls: int
    """In each trial."""
    seconds: float
    """Of a call: median over trials."""
    spread: float
    """Distance of the quartiles as a share of the median; NaN for fewer than two trials."""
    bytes: int
    flops: int

    @property
    def bytes_per_s(self) -> float:
        """Achieved, by the bytes that cannot be avoided."""
        return self.bytes / self.seconds

    @property
    def flops_per_s(self) -> float:
        """Achieved."""
        return self.flops / self.seconds


def describe() -> dict[str, Any]:
    """Start time, commit, versions, platform, device and CPU, as plain values for JSON."""
    import jax

    device = jax.devices()[0]
    packages = {name: _version(name) for name in ("jax", "jaxlib", "numpy", "torch")}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain")),
        "versions": {"python": platform.python_version(), **packages},
        "platform": platform.platform(),
        "device": {"platform": device.platform, "kind": device.device_kind, "count": len(jax.devices())},
        "cpu": {"model": platform.processor() or platform.machine(), "count": os.cpu_count()},
    }


def write_json(path: Path, values: Any) -> None:
    """Indented JSON, which is YAML as well."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line to trials.jsonl; it is on the disk before this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_trials(directory: Path) -> list[dict[str, Any]]:
    """What `append` wrote, without a last line that a kill cut off.

    Raises ValueError, one sentence, where there are none.
    """
    path = directory / "trials.jsonl"
    if not path.exists():
        raise ValueError(f"no trials.jsonl in {directory}: run `python -m pallas_kernels.bench --output-dir DIR` first")
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def summarise(records: Sequence[Mapping[str, Any]]) -> list[Summary]:
    """One summary for each point, in the order of their first trials' settings."""
    by_setting: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_setting.setdefault(json.dumps(record["setting"]), []).append(record["metrics"])
    found = []
    for setting, metrics in by_setting.items():
        seconds = [m["seconds_per_call"] for m in metrics]
        median, spread = statistics.median(seconds), math.nan
        if len(seconds) > 1:
            low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
            spread = (high - low) / median
        first = metrics[0]
        found.append(
            Summary(
                json.loads(setting),
                len(seconds),
                first["calls"],
                median,
                spread,
                first["bytes_per_call"],
                first["flops_per_call"],
            )
        )
    return sorted(found, key=_order)


def split(summaries: Sequence[Summary]) -> tuple[list[Summary], dict[str, Summary]]:
    """Attention, and the roofs by name."""
    roofs = {s.setting["implementation"]: s for s in summaries if s.setting["implementation"] in ROOFS}
    return [s for s in summaries if s.setting["implementation"] not in ROOFS], roofs


def write_summaries(directory: Path, summaries: Sequence[Summary], title: str) -> str:
    """Write summary.csv, .md and .tex; returns the table for a terminal."""
    attention, roofs = split(summaries)
    copy = roofs["copy"].bytes_per_s
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([
        "implementation", "kernel", "batch", "context", "page_size", "query_tile", "key_tile", "seconds_median",
        "spread", "trials", "calls", "bytes_per_call", "flops_per_call", "bytes_per_s", "flops_per_s", "share_of_copy",
    ])  # fmt: skip
    for s in [*attention, *roofs.values()]:
        tiles = s.setting["tiles"] or ("", "")
        writer.writerow([
            *(s.setting[k] for k in ("implementation", "kernel", "batch", "context", "page_size")), *tiles, s.seconds,
            s.spread, s.trials, s.calls, s.bytes, s.flops, s.bytes_per_s, s.flops_per_s, s.bytes_per_s / copy,
        ])  # fmt: skip
    (directory / "summary.csv").write_text(text.getvalue(), encoding="utf-8")
    rows = [_cells(s, copy) for s in attention]
    heads = [f"{name} ({unit})" if unit else name for name, unit in _COLUMNS.items()]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [" | ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in (heads, *rows)]
    ruler = "|".join("-" * (w + 1) + ":" for w in widths)
    markdown = [f"### {title}", "", f"| {lines[0]} |", f"|{ruler}|", *(f"| {line} |" for line in lines[1:]), ""]
    (directory / "summary.md").write_text("\n".join(markdown), encoding="utf-8")
    (directory / "summary.tex").write_text(_latex(title, heads, rows), encoding="utf-8")
    plain = [line.replace(" | ", "  ") for line in lines]
    return "\n".join([title, "", plain[0], "  ".join("-" * w for w in widths), *plain[1:], ""])


def best_tiles(summaries: Sequence[Summary]) -> list[str]:
    """A sentence for each point at which an implementation was timed with several tiles."""
    cells: dict[tuple[Any, ...], list[Summary]] = {}
    for s in split(summaries)[0]:
        cells.setdefault(tuple(s.setting[k] for k in ("implementation", "batch", "context", "page_size")), []).append(s)
    sentences = []
    for (name, batch, context, page), tried in cells.items():
        default = [s for s in tried if s.setting["tiles"] is None]
        best = min(tried, key=lambda s: s.seconds)
        if len(tried) < 2:
            continue
        text = f"{name}, batch {batch}, context {context}, page {page}: best {_tiles(best)} of {len(tried)} tiles"
        if default:
            text += f", {default[0].seconds / best.seconds:.2f} times as fast as the default"
        sentences.append(text)
    return sentences


def _order(summary: Summary) -> tuple[Any, ...]:
    s = summary.setting
    return s["batch"] or 0, s["context"] or 0, s["page_size"] or 0, s["implementation"], tuple(s["tiles"] or ())


def _tiles(summary: Summary) -> str:
    tiles = summary.setting["tiles"]
    return "{}, {}".format(*tiles) if tiles else "default"


def _cells(s: Summary, copy: float) -> list[str]:
    name, kernel = s.setting["implementation"], s.setting["kernel"]
    spread = "n/a" if math.isnan(s.spread) else f"{100 * s.spread:.1f}"
    return [
        name if kernel in (None, name) else f"{name} ({kernel})",
        str(s.setting["batch"]),
        str(s.setting["context"]),
        str(s.setting["page_size"] or "-"),
        _tiles(s) if kernel else "-",
        f"{1e6 * s.seconds:.1f}",
        spread,
        f"{s.bytes_per_s / 1e9:.4g}",
        f"{100 * s.bytes_per_s / copy:.1f}",
    ]


def _latex(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        text = " & ".join(cells).replace("_", r"\_").replace("%", r"\%").replace("µ", r"\textmu{}")
        return rf"    {text} \\"

    top = [r"\begin{table}", r"  \centering", rf"  \caption{{{line([title]).strip(' \\')}}}"]
    body = [rf"  \begin{{tabular}}{{{'r' * len(heads)}}}", r"    \toprule", line(heads), r"    \midrule"]
    end = [r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""]
    return "\n".join([*top, *body, *map(line, rows), *end])


def _git(*arguments: str) -> str | None:
    """What git prints about the checkout that this file is in; None if it is in none."""
    here = Path(__file__).resolve()
    try:
        for command in (["ls-files", "--error-unmatch", here.name], arguments):
            done = subprocess.run(["git", *command], cwd=here.parent, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
