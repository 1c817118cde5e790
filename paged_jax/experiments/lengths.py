"""Laws of lengths: how many tokens a prompt or an output has, how many turns a conversation."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from pydantic import Field, model_validator

from paged_jax.config import StrictModel

Count = Annotated[int, Field(ge=1)]
Mean = Annotated[float, Field(gt=0)]
Sigma = Annotated[float, Field(ge=0, le=5)]

Law = Literal["lognormal", "uniform", "zipf", "bimodal", "constant"]
LAWS: tuple[str, ...] = get_args(Law)

_READS = {
    "lognormal": ("mean", "sigma", "max"),
    "uniform": ("max",),
    "zipf": ("exponent", "max"),
    "bimodal": ("modes", "share", "max"),
    "constant": ("value",),
}
"""The keys without which a law cannot be drawn from; all but `constant` read `min` as well."""
_MAX_ZIPF_RANKS = 10_000_000


class Mode(StrictModel):
    """One of the two lognormal humps of a bimodal law."""

    mean: Mean
    sigma: Sigma


class Lengths(StrictModel):
    """Whole numbers drawn from a law, 1 or more; a key that the law does not read is refused."""

    mean: Mean | None = None
    """Mean of the lognormal before clipping."""
    sigma: Sigma | None = None
    """Standard deviation of the logarithm of the length; 0: every length is the mean."""
    exponent: Annotated[float, Field(ge=0, le=10)] | None = None
    """Of Zipf's law; 0: all lengths are equally likely."""
    modes: tuple[Mode, Mode] | None = None
    """The two lognormals, each {mean, sigma}."""
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of lengths from the first of the modes."""
    value: Count | None = None
    """Every length."""
    min: Count | None = None
    """Least length; unset, 1."""
    max: Count | None = None
    """Greatest length."""
    law: Law | None = None
    """lognormal: {mean, sigma, min, max}, rounded, then clipped to [min, max]; uniform: {min, max}, each length equally
    likely; zipf: {exponent, min, max}, length min - 1 + k with probability proportional to 1 / k ** exponent; bimodal:
    {modes, share, min, max}, one of two lognormals; constant: {value}. Unset: the workload's kind where that is a law,
    else lognormal."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.law is None:
            return self  # whoever knows the law checks it, see `under`
        wanted = _READS[self.law]
        if missing := [name for name in wanted if getattr(self, name) is None]:
            raise ValueError(f"law {self.law!r} needs {' and '.join(missing)}: give it {', '.join(wanted)}")
        read = {"law", *wanted, *(() if self.law == "constant" else ("min",))}
        for name in type(self).model_fields:
            if name not in read and getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect with law {self.law!r}: leave it out")
        if self.max is not None and self.shortest > self.max:
            raise ValueError(f"min ({self.shortest}) is more than max ({self.max}): lower the one or raise the other")
        means = [mode.mean for mode in self.modes or ()] if self.mean is None else [self.mean]
        for mean in means:
            if not self.shortest <= mean <= self.longest:
                raise ValueError(f"the mean ({mean:g}) must lie between min ({self.shortest}) and max ({self.max})")
        if self.law == "zipf" and self.longest - self.shortest >= _MAX_ZIPF_RANKS:
            raise ValueError(f"zipf has {_MAX_ZIPF_RANKS} ranks at most: lower max ({self.max})")
        return self

    def under(self, law: str) -> Self:
        """The same with its law named, `law` if it has none yet; ValueError if its keys are not that law's."""
        return self if self.law is not None else type(self).model_validate(with_law(self, law))

    @property
    def shortest(self) -> int:
        """The least that can be drawn."""
        return self.value or self.min or 1

    @property
    def longest(self) -> int:
        """The greatest that can be drawn."""
        longest = self.value or self.max
        assert longest is not None, "every law has one of them"
        return longest

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """`count` lengths; without a law they are lognormal: exp(N(ln mean - sigma^2 / 2, sigma))."""
        drawn = self.under("lognormal")
        match drawn.law:
            case "lognormal":
                return drawn._clip(_lognormal(drawn.mean, drawn.sigma, count, rng))
            case "uniform":
                return rng.integers(drawn.shortest, drawn.longest + 1, size=count).tolist()
            case "zipf":
                return drawn._zipf(count, rng)
            case "bimodal":
                first, second = drawn.modes or ()
                chosen = rng.random(count) < drawn.share
                humps = [_lognormal(mode.mean, mode.sigma, count, rng) for mode in (first, second)]
                return drawn._clip(np.where(chosen, *humps))
            case _:
                return [drawn.longest] * count

    def _zipf(self, count: int, rng: np.random.Generator) -> list[int]:
        shares = np.arange(1, self.longest - self.shortest + 2) ** -float(self.exponent or 0)
        below = np.cumsum(shares)
        ranks = np.searchsorted(below, rng.random(count) * below[-1], side="right")
        return (self.shortest + np.minimum(ranks, len(shares) - 1)).tolist()

    def _clip(self, lengths: np.ndarray) -> list[int]:
        return np.clip(np.rint(lengths), self.shortest, self.longest).astype(int).tolist()


def with_law(lengths: Any, law: str) -> Any:
    """What a file or a caller gives for lengths, with its law named if it names none."""
    if isinstance(lengths, Lengths) and lengths.law is None:
        lengths = lengths.model_dump(exclude_none=True)
    if isinstance(lengths, Mapping) and lengths.get("law") is None:
        return {**lengths, "law": law}
    return lengths


def _lognormal(mean: float | None, sigma: float | None, count: int, rng: np.random.Generator) -> np.ndarray:
    assert mean is not None, "the law was checked"
    assert sigma is not None, "the law was checked"
    return np.exp(rng.normal(np.log(mean) - sigma**2 / 2, sigma, count))
