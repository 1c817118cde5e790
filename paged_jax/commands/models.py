"""`paged-jax models` and `paged-jax fetch`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro


@dataclass(frozen=True)
class Models:
    """List the catalogue of models.

    For each: name, shape, where its weights come from, and whether they are on this machine. A model with its
    shape only can be used with random weights, in an experiment or in Python: load_format dummy. The simulator takes
    all of them, and is the only one to take those that say so.
    """

    needs: ClassVar[str] = ""

    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Print the table."""
        from paged_jax.catalog.entries import entries

        rows = [("NAME", "SHAPE", "SOURCE", "CACHED")]
        for entry in entries():
            cached = "-" if entry.source is None else "yes" if entry.cached else "no"
            rows.append((entry.name, entry.shape_summary, entry.source_summary, cached))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@dataclass(frozen=True)
class Fetch:
    """Fetch a model of the catalogue; print the path of its weights.

    They are kept in your cache directory ($PAGED_JAX_CACHE chooses another) and work offline ever after.

    example:
        paged-jax fetch smollm2-135m
    """

    needs: ClassVar[str] = "NAME"

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """As `paged-jax models` lists it."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Fetch unless it is here already."""
        from paged_jax.catalog.fetch import fetch

        print(fetch(self.name))
