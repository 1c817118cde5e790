"""`paged-jax plot`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro


@dataclass(frozen=True)
class Plot:
    """Draw several results on the same axes.

    Results are directories that `paged-jax run` has written. Each metric becomes a figure, as PDF and PNG, over the
    key that all results sweep; a line is named by its experiment, or by what differs in the config.yaml files.

    examples:
        paged-jax plot results/before results/after
        paged-jax plot results/a100 results/h100 --metric output_tokens_per_s --x engine.block_size --output figures
    """

    needs: ClassVar[str] = "RESULTS"

    results: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RESULTS [RESULTS ...]")]
    """Results directories."""
    metric: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="METRIC", help_behavior_hint="")
    ] = ()
    """What to draw, once or more; unset, the metrics that all of the reports show."""
    x: Annotated[str | None, tyro.conf.arg(metavar="KEY", help_behavior_hint="")] = None
    """The swept key on the horizontal axis; unset, that of the reports."""
    output: Annotated[str, tyro.conf.arg(metavar="DIR")] = "results/overlay"
    """Where the figures are written."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Draw, and name the files."""
        from paged_jax.experiments.overlay import overlay

        drawn = overlay(self.results, self.output, metrics=self.metric, x=self.x)
        for note in drawn.notes:
            print(f"* {note}")
        for file in drawn.files:
            print(file)
