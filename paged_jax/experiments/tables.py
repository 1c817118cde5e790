"""Tables of text: for a terminal, for Markdown and for LaTeX (booktabs)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paged_jax.experiments.statistics import Estimate

_LATEX = {"\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{",
"}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "≥": r"$\ge$", "≤": r"$\le$",
"<": r"$<$", ">": r"$>$"}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Cells of text under headings that may have a unit."""

    title: str
    headings: tuple[str, ...]
    units: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 0
    """So many columns, from the first, hold words and are aligned to the left; the others to the right."""

    def terminal(self) -> str:
        """Aligned columns, units on a line of their own."""
        heads = [self.headings, *([self.units] if any(self.units) else [])]
        widths = _widths([*heads, *self.rows])
        lines = [self._line(row, widths, "  ") for row in heads]
        lines += ["  ".join("-" * w for w in widths), *(self._line(row, widths, "  ") for row in self.rows)]
        return "\n".join([self.title, "", *lines, ""])

    def markdown(self) -> str:
        """A pipe table whose source lines up too."""
        head = tuple(f"{h} ({u})" if u else h for h, u in zip(self.headings, self.units, strict=True))
        cells = [tuple(cell.replace("|", r"\|") for cell in row) for row in (head, *self.rows)]
        widths = _widths(cells)
        ruler = "|".join("-" * (w + 1) + ("-" if i < self.left else ":") for i, w in enumerate(widths))
        lines = [f"| {self._line(row, widths, ' | ')} |" for row in cells]
        return "\n".join([f"### {self.title}", "", lines[0], f"|{ruler}|", *lines[1:], ""])

    def latex(self) -> str:
        """A table environment for \\usepackage{booktabs}."""
        rows = [" & ".join(map(escape, row)) + r" \\" for row in self.rows]
        units = [" & ".join(escape(f"({u})" if u else "") for u in self.units) + r" \\"] if any(self.units) else []
        return "\n".join(
            [
                r"\begin{table}",
                r"  \centering",
                rf"  \caption{{{escape(self.title)}}}",
                rf"  \begin{{tabular}}{{{'l' * self.left + 'r' * (len(self.headings) - self.left)}}}",
                r"    \toprule",
                f"    {' & '.join(map(escape, self.headings))} \\\\",
                *(f"    {line}" for line in units),
                r"    \midrule",
                *(f"    {row}" for row in rows),
                r"    \bottomrule",
                r"  \end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def _line(self, row: Sequence[str], widths: Sequence[int], gap: str) -> str:
        cells = zip(row, widths, strict=True)
        return gap.join(c.ljust(w) if i < self.left else c.rjust(w) for i, (c, w) in enumerate(cells))


def number(value: float, precision: float = math.nan) -> str:
    """`value` with the decimals that two significant digits of `precision` need.

    Without a precision, or with one that is only rounding dust beside the value (under a millionth), four
    significant digits of its own.
    """
    if not math.isfinite(value):
        return "n/a"
    if math.isfinite(precision) and precision > 1e-6 * abs(value):
        return f"{value:.{_decimals(precision, 2)}f}"
    if value == 0 or (float(value).is_integer() and abs(value) < 1e9):
        return f"{value:.0f}"
    return f"{value:.{_decimals(value, 4)}f}"


def with_interval(value: Estimate, factor: float, *, signed: bool = False) -> str:
    """Such as `147.3 ± 2.1`; the mean alone when there is no interval."""
    mean, half = value.mean * factor, value.half_width * factor
    text = number(mean, half)
    if signed and mean > 0:
        text = f"+{text}"
    return text if not math.isfinite(half) else f"{text} ± {deviation(half, mean)}"


def deviation(value: float, mean: float) -> str:
    """A half-width or standard deviation to two significant digits; 0 for rounding dust beside the mean."""
    return "0" if value <= 1e-6 * abs(mean) else number(value, value)


def _decimals(value: float, significant: int) -> int:
    return max(0, significant - 1 - math.floor(math.log10(abs(value))))


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def escape(text: str) -> str:
    """LaTeX's special characters made plain; a leading minus becomes a real one."""
    escaped = "".join(_LATEX.get(c, c) for c in text)
    return f"${escaped[0]}${escaped[1:]}" if escaped[:1] in "-+" and escaped[1:2].isdigit() else escaped
