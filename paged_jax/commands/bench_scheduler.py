"""`paged-jax bench-scheduler`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from paged_jax.commands import UsageError
from paged_jax.flags import flag_name


@dataclass(frozen=True)
class BenchScheduler:
    """Time the scheduler: microseconds of the host per step, per request and per admitted prompt.

    The real engine runs over an executor that answers at once. Shown are the smallest of the samples and their median:
    read the smallest on a machine with other work. Engine settings may follow; they go to every row.

    examples:
        paged-jax bench-scheduler
        paged-jax bench-scheduler --running 256 --repeats 20
        paged-jax bench-scheduler scheduling_policy=my_policies:MyQueue
    """

    needs: ClassVar[str] = ""

    overrides: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint=""),
    ] = ()
    """Engine settings, such as eviction=lfu."""
    running: tuple[int, ...] = (16, 64, 256, 1024)
    """Requests that decode at once."""
    prompt_len: int = 1000
    """Tokens of each prompt."""
    block_size: int = 16
    """Tokens per KV block."""
    repeats: int = 20
    """Samples of each number."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Measure and print the table."""
        for name, value in {"running": min(self.running, default=0), "prompt_len": self.prompt_len,
                            "block_size": self.block_size, "repeats": self.repeats}.items():  # fmt: skip
            if value < 1:
                raise UsageError(f"{flag_name(name)} must be 1 or more, got {value}")
        from tqdm import tqdm

        from paged_jax.experiments.config import read_overrides
        from paged_jax.experiments.scheduler_bench import SETTINGS, measure, table

        engine = read_overrides(self.overrides)
        with tqdm(total=len(SETTINGS) * (len(self.running) + 2), leave=False) as bar:
            costs = []
            for cost in measure(
                self.running,
                prompt_len=self.prompt_len,
                block_size=self.block_size,
                repeats=self.repeats,
                engine=engine,
                progress=bar.set_description_str,
            ):
                costs.append(cost)
                bar.update()
        print(table(costs), end="")
