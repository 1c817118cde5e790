"""`paged-jax bench-scheduler`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from paged_jax.commands import BAR_FORMAT, UsageError
from paged_jax.flags import flag_name


@dataclass(frozen=True)
class BenchScheduler:
    """Time the scheduler: microseconds of the host per step, per request and per admitted prompt.

    The real engine runs over an executor that answers at once. A step costs what comes before its launch (planning) and
    what comes after its result (booking), together the column "scheduler"; an admission also costs the door, which
    checks and queues the request. Shown are the smallest of the samples and their median: read the smallest on a
    machine with other work. Engine settings may follow; they go to every row.

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
        from paged_jax.experiments.scheduler_bench import rows, table

        planned = rows(
            self.running,
            prompt_len=self.prompt_len,
            block_size=self.block_size,
            repeats=self.repeats,
            overrides=read_overrides(self.overrides),
        )
        measured = []
        with tqdm(total=len(planned), bar_format=BAR_FORMAT, leave=False) as bar:
            for row in planned:
                bar.set_description_str(f"{row.setting.name}: {row.work}")
                measured.append((row, row.samples()))
                bar.update()
        print(table(measured), end="")
