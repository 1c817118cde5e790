"""`paged-jax calibrate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from paged_jax.commands import BAR_FORMAT, UsageError
from paged_jax.flags import flag_name

if TYPE_CHECKING:
    from paged_jax.simulation.fit import PartError, Sample, Stage
    from paged_jax.simulation.hardware import Hardware


@dataclass(frozen=True)
class Calibrate:
    """Fit the simulator's device: to this machine, or to published profiles.

    Measures steps of the real executor (batches of decodes by context, chunks of prompts, page sizes), fits the
    constants of a hardware file to them, writes it, and says how well it predicts shapes that the fit has not seen. The
    file's name can then stand for `hardware` in experiments.

    examples:
        paged-jax calibrate
        paged-jax calibrate --cross-check
        paged-jax calibrate --profiles ../shared/traces/vidur_profiling --base a100-80gb
    """

    needs: ClassVar[str] = ""

    model: str = "smollm2-135m"
    """Whose steps are measured; its weights are random, and nothing is fetched."""
    output: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: this-machine.yaml)")] = (
        "this-machine.yaml"
    )
    """Hardware file that is written."""
    base: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Hardware whose other constants are kept; unset, this-cpu, or a100-80gb with profiles."""
    profiles: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Fit these measurements (Vidur's mlp.csv and attention.csv) in place of this machine; --base is their device."""
    block_sizes: tuple[int, ...] = (16, 1, 128)
    """Page sizes that are measured, the first one most of all."""
    repeats: int = 5
    """Times that each shape is measured; the median counts."""
    seed: int = 0
    """Decides which shapes are held out, and the order of measuring."""
    cross_check: tyro.conf.FlagCreatePairsOff[bool] = False
    """Then serve a workload on the real and on the simulated executor, and compare them."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Measure or read, fit, write, report."""
        self._check()
        from paged_jax.simulation.hardware import load_hardware
        from paged_jax.simulation.hardware_file import hardware_text

        base = load_hardware(self.base or ("a100-80gb" if self.profiles else "this-cpu"))
        Path(self.output).touch()  # before minutes of measuring
        if self.profiles:
            fitted, samples, stages, comments = self._from_profiles(base)
        else:
            fitted, samples, stages, comments = self._from_machine(base)
        from paged_jax.simulation.fit import part_errors

        errors = part_errors(fitted, samples, seed=self.seed)
        comments += tuple(_sentence(error) for error in errors)
        Path(self.output).write_text(hardware_text(fitted, comments), encoding="utf-8")
        print(_constants(base, fitted, stages))
        print(_errors(errors))
        print(f"wrote {self.output}")
        if self.cross_check:
            self._cross_check()

    def _check(self) -> None:
        for name, value in {"block_sizes": min(self.block_sizes, default=0), "repeats": self.repeats}.items():
            if value < 1:
                raise UsageError(f"{flag_name(name)} must be 1 or more, got {value}")
        if not self.output.endswith(".yaml"):
            raise UsageError(f"--output must end in .yaml, as hardware files do, got {self.output!r}")
        if self.profiles and self.cross_check:
            raise UsageError("--cross-check compares with this machine, which --profiles does not measure: choose one")

    def _from_profiles(
        self, base: "Hardware"
    ) -> tuple["Hardware", "list[Sample]", "tuple[Stage, ...]", tuple[str, ...]]:
        from tqdm import tqdm

        from paged_jax.simulation.fit import fit
        from paged_jax.simulation.profiles import PROFILE_STAGES, read_profiles

        assert self.profiles is not None
        samples = read_profiles(self.profiles)
        with tqdm(total=len(PROFILE_STAGES), bar_format=BAR_FORMAT, leave=False) as bar:

            def begin(stage: "Stage") -> None:
                bar.set_description_str(f"fitting {', '.join(stage.parts)}")
                bar.update()

            fitted = fit(base, samples, PROFILE_STAGES, seed=self.seed, on_stage=begin)
        fitted = fitted.model_copy(update={"name": Path(self.output).stem})
        comments = (f"{base.name}, with constants fitted by `paged-jax calibrate --profiles`.",)
        return fitted, samples, PROFILE_STAGES, comments

    def _from_machine(
        self, base: "Hardware"
    ) -> tuple["Hardware", "list[Sample]", "tuple[Stage, ...]", tuple[str, ...]]:
        from tqdm import tqdm

        from paged_jax.simulation.fit import fit
        from paged_jax.simulation.measure import MEASURED_STAGES, Machine, Point, measure, points

        with tqdm(bar_format=BAR_FORMAT, leave=False) as bar:
            bar.set_description_str(f"loading {self.model}")
            machine = Machine(self.model)
            if machine.platform != base.kind:
                raise ValueError(
                    f"this machine's device is a {machine.platform.upper()}, and --base {base.name} is a "
                    f"{base.kind.upper()}: give one of its kind"
                )
            chosen = points(self.block_sizes, machine.longest, self.seed)
            bar.reset(total=len(chosen) * (self.repeats + 1) + 2)
            bar.set_description_str("peaks")
            probes = [machine.probe()]
            bar.update()

            def done(point: Point) -> None:
                bar.set_description_str(point.part)
                bar.update()

            samples = measure(machine, chosen, repeats=self.repeats, seed=self.seed, on_step=done)
            probes.append(machine.probe())
            bar.update()
        flops, bandwidth = (max(values) for values in zip(*probes, strict=True))
        known = {
            "name": Path(self.output).stem,
            "memory_bandwidth": bandwidth,
            "peak_flops": {**base.peak_flops, machine.dtype: flops},
        }
        start = base.model_copy(update=known)
        fitted = fit(start, samples, MEASURED_STAGES, seed=self.seed)
        comments = (
            f"{machine.device_kind}, measured by `paged-jax calibrate` with {self.model} in {machine.dtype}: peaks are "
            "the best that was seen,",
            f"efficiencies are fitted, all else is that of {base.name}.",
        )
        return fitted, samples, MEASURED_STAGES, comments

    def _cross_check(self) -> None:
        from tqdm import tqdm

        from paged_jax.experiments.cross_check import cross_check, cross_check_table

        repeats = max(1, self.repeats // 2)
        with tqdm(total=repeats, bar_format=BAR_FORMAT, leave=False) as bar:
            bar.set_description_str("serving the same workload")
            rows = cross_check(self.model, self.output, repeats=repeats, seed=self.seed, on_run=bar.update)
        print(cross_check_table(rows), end="")


def _constants(base: "Hardware", fitted: "Hardware", stages: "tuple[Stage, ...]") -> str:
    """What was fitted, beside what it was."""
    from paged_jax.experiments.tables import Table
    from paged_jax.simulation.fit import constant

    paths = [parameter.path for stage in stages for parameter in stage.parameters]
    rows = tuple((path, f"{constant(base, path):.4g}", f"{constant(fitted, path):.4g}") for path in paths)
    return Table("Fitted constants", ("constant", base.name, "fitted"), ("", "", ""), rows, left=1).terminal()


def _errors(errors: "list[PartError]") -> str:
    """Mean absolute percentage errors by part."""
    from paged_jax.experiments.tables import Table

    rows = tuple(
        (e.part, str(e.num_fitted), f"{e.fitted:.1f}", str(e.num_held_out), f"{e.held_out:.1f}") for e in errors
    )
    return Table(
        "Mean absolute errors of predicted times",
        ("part", "shapes fitted", "error", "shapes held out", "error"),
        ("", "", "%", "", "%"),
        rows,
        left=1,
    ).terminal()


def _sentence(error: "PartError") -> str:
    return f"{error.part}: mean absolute error {error.held_out:.1f} % on {error.num_held_out} held-out shapes."
