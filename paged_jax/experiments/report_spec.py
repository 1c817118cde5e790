"""What an experiment file says about its tables and figures."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from paged_jax.config import StrictModel, nearest
from paged_jax.experiments.metrics import METRICS

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Panels = tuple[tuple[str, ...], ...]


def larger_is_better(metric: str) -> bool | None:
    """Whether more of the metric is wanted, as of rates, or less, as of times; None where it depends."""
    unit = METRICS[metric].unit
    return True if unit.endswith("/s") else False if unit.partition("/")[0] == "s" else None


class Report(StrictModel):
    """What the tables and the figures show."""

    x: str | None = None
    """The swept key on the horizontal axis; unset, the first one. Other swept keys become series."""
    y: Annotated[tuple[str, ...], Field(min_length=1)]
    """Metrics: the columns of the tables."""
    baseline: int | float | str | bool | tuple[Any, ...] | None = None
    """The value of x that the others are compared with, in paired differences; unset, no comparison."""
    optimum: str | None = None
    """A throughput or latency: a table tells for each series which x is best by it, and how flat it is there."""
    figures: dict[Name, Panels] | None = None
    """File name to panels, each a list of metrics that share an axis; unset, one figure for each of `y`."""

    @model_validator(mode="before")
    @classmethod
    def _panels(cls, values: Any) -> Any:
        """A figure written as one flat list is one panel."""
        figures = values.get("figures") if isinstance(values, Mapping) else None
        if not isinstance(figures, Mapping):
            return values
        flat = {k: (v,) if isinstance(v, tuple) and v and all(isinstance(m, str) for m in v) else v
                for k, v in figures.items()}  # fmt: skip
        return {**values, "figures": flat}

    @model_validator(mode="after")
    def _metrics_exist(self) -> Self:
        for where, names in [
            ("y", self.y),
            ("optimum", (self.optimum,) if self.optimum is not None else ()),
            *((f"figures.{k}", sum(v, ())) for k, v in (self.figures or {}).items()),
        ]:
            for name in names:
                if name not in METRICS:
                    raise ValueError(f"report.{where} names an unknown metric {name!r}{nearest(name, list(METRICS))}")
        if self.optimum is not None and larger_is_better(self.optimum) is None:
            raise ValueError(
                f"report.optimum {self.optimum!r} is neither a rate nor a time, so that its best value is not known: "
                "choose one such as output_tokens_per_s"
            )
        for key, panels in (self.figures or {}).items():
            if not panels:
                raise ValueError(f"report.figures.{key} is empty: list the metrics that it shows, or leave it out")
            for panel in panels:
                units = sorted({METRICS[m].unit or "counts" for m in panel})
                if len(units) != 1:
                    raise ValueError(
                        f"report.figures.{key} puts {' and '.join(units) or 'nothing'} on one axis: "
                        "give each unit a panel of its own, [[...], [...]]"
                    )
        return self

    @property
    def panels(self) -> dict[str, Panels]:
        """Every figure's panels, by file name."""
        return {m: ((m,),) for m in self.y} if self.figures is None else self.figures
