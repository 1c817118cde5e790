"""The command line of the benchmark: correctness first, then timings, then the tables."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_kernels.bench.cases import Settings

PROGRAM = "python -m pallas_kernels.bench"
STATUS_WRONG, STATUS_USAGE = 1, 2
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "float8_e4m3fn")
IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu", "triton", "xla", "contiguous", "torch", "jax")

_DESCRIPTION = """\
Time decode attention over batch x context x page size x tile, and print achieved bytes/s as a share of the bandwidth
at which this device copies a large array. Every implementation is first compared with the reference on a batch of
prefill chunks and decodes and on long decodes; a difference ends the run with status 1 and names the case.

Bytes are those of the keys and values of all visible tokens, the queries and the outputs; where they fit the device's
last-level cache, a point measures that cache and not the memory. A time is the median over trials, each
a chain of calls on one another's outputs in one program; the spread is the distance of the quartiles.
Trials of all implementations are interleaved in a seeded random order, copies of the large array among them.

  mosaic_gpu, mosaic_tpu, triton, xla   implementations of pallas_kernels.paged_attention
  contiguous   the platform's default one of these over a cache as if it were not paged: pages of 512 tokens, the
               largest there are (or one page of the whole context), lying one after the other and in order
  torch        torch's scaled_dot_product_attention over contiguous keys and values (GPU, if torch is installed)
  jax          JAX's own paged attention (GPU, decode only) or ragged paged attention (TPU)

There is no --interpret: timing an interpreter tells nothing, so a kernel that cannot run here is refused."""
_EPILOG = """\
examples:
  PROGRAM                                   a complete run: under 8 minutes on one GPU
  PROGRAM --quick                           tiny shapes, to see that it works: under a minute anywhere
  PROGRAM --batch 64 --context 4096 --page-sizes 1,16,128 --implementations mosaic_gpu,contiguous
  PROGRAM --tiles default,16x32,16x128      query x key tokens of a compute tile
  PROGRAM --figure results/bench            draw the figure of a run, from its trials.jsonl alone

A run writes config.yaml, environment.json, trials.jsonl, summary.csv, .md and .tex, and figures/ to --output-dir.
The tables go to standard output, progress to standard error."""


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run the benchmark with these arguments, by default those of the process; returns the exit status.

    `program` is how it was called.
    """
    options = _parser(program).parse_args(arguments)
    try:
        if options.figure is not None:
            return _figure(Path(options.figure), program)
        return _run(options, program)
    except ValueError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return STATUS_USAGE


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=_DESCRIPTION,
        epilog=_EPILOG.replace("PROGRAM", program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--implementations", type=_names, metavar="A,B", help="what to time; default: all that the platform has")
    add("--batch", type=_numbers, metavar="N,N", help="sequences, each decoding one token; default: 8,64 (CPU: 1,8)")
    add("--context", type=_numbers, metavar="N,N", help="tokens of each; default: 1024,4096 (CPU: 128,512)")
    add("--page-sizes", type=_page_sizes, metavar="N,N", help="tokens of a page, 1 to 512; default: 16,128")
    add("--tiles", type=_tiles, metavar="QxK,QxK", help='"default" among them is the table\'s; unset, that, and others '
        "at the largest batch and context")  # fmt: skip
    add("--heads", type=_heads, metavar="Hq,Hkv,D", help="query heads, KV heads, head_dim; default: 32,8,128 (CPU: "
        "9,3,64)")  # fmt: skip
    add("--dtype", choices=DTYPES, help="of queries and outputs; default: bfloat16 (CPU: float32)")
    add("--kv-dtype", choices=KV_DTYPES, help="of the pages; default: that of the queries")
    add("--repeats", type=_number, metavar="N", help="trials of each point; default: 7 (CPU: 5)")
    add("--output-dir", default="results/bench", metavar="DIR", help="default: %(default)s")
    add("--fresh", action="store_true", help="throw away what an earlier run left in the output directory")
    add("--quick", action="store_true", help="tiny shapes and two trials: a test of the benchmark, not of the device")
    add("--figure", metavar="DIR", help="only draw the figure of the run in DIR; needs matplotlib")
    return parser


def _run(options: argparse.Namespace, program: str) -> int:
    directory = Path(options.output_dir)
    if (directory / "trials.jsonl").exists() and not options.fresh:
        raise ValueError(f"{directory} holds an earlier run: discard it with --fresh or name another --output-dir")
    # torch shares the GPU, and wants some of its memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from pallas_kernels.bench import report
    from pallas_kernels.bench.cases import points, refusal
    from pallas_kernels.bench.measure import Progress, check_all, num_checks, time_all

    settings = _settings(options, jax.default_backend())
    cells, skipped = [], {}
    for point in points(settings):
        reason = refusal(point, settings)
        asked = options.implementations is not None and (point.tiles is None or options.tiles is not None)
        if reason is None:
            cells.append(point)
        elif asked:
            raise ValueError(f"{point}: {reason}")
        else:
            skipped[f"not timed: {point.implementation}: {reason}"] = None
    for text in skipped:
        print(text, file=sys.stderr)
    if not cells:
        raise ValueError("nothing that was asked for can run here")
    for name in report.GENERATED:
        (directory / name).unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    report.write_json(directory / "config.yaml", asdict(settings))
    environment = report.describe()
    report.write_json(directory / "environment.json", {"runs": [environment]})
    device = f"{environment['device']['kind']}, jax {environment['versions']['jax']}"
    progress = Progress(num_checks(cells) + len(cells))
    cells, problem = check_all(cells, settings, progress)
    if problem is not None:
        print(f"{program}: error: {problem}", file=sys.stderr)
        return STATUS_WRONG
    time_all(cells, settings, progress, directory / "trials.jsonl")
    summaries = report.summarise(report.read_trials(directory))
    heads = "{} query heads, {} KV heads of {}".format(*settings.heads)
    types = f"{settings.dtype}, pages of {settings.kv_dtype}"
    print(report.write_summaries(directory, summaries, f"Decode attention, {heads}, {types}, on {device}"))
    _, roofs = report.split(summaries)
    print(f"copy bandwidth: {roofs['copy'].bytes_per_s / 1e9:.4g} GB/s, read and written")
    print(f"matrix products: {roofs['matmul'].flops_per_s / 1e9:.4g} GFLOP/s")
    for sentence in report.best_tiles(summaries):
        print(f"tiles: {sentence}")
    print("the defaults are in pallas_kernels/paged_attention/tiles.py")
    return _figure(directory, program)


def _settings(options: argparse.Namespace, platform: str) -> "Settings":
    """What was asked for, and the platform's defaults."""
    from pallas_kernels.bench.cases import PLATFORM_DEFAULTS, Settings

    small = options.quick or platform == "cpu"
    dtype = options.dtype or ("float32" if platform == "cpu" else "bfloat16")
    if options.quick:
        batch, context, pages, heads = (2,), (64,), (16,), (4, 2, 64)
    elif small:
        batch, context, pages, heads = (1, 8), (128, 512), (16, 128), (9, 3, 64)
    else:
        batch, context, pages, heads = (8, 64), (1024, 4096), (16, 128), (32, 8, 128)
    return Settings(
        platform=platform,
        implementations=options.implementations or PLATFORM_DEFAULTS[platform],
        batch=options.batch or batch,
        context=options.context or context,
        page_sizes=options.page_sizes or pages,
        tiles=options.tiles or ((None, (16, 32)) if options.quick else ()),
        heads=options.heads or heads,
        dtype=dtype,
        kv_dtype=options.kv_dtype or dtype,
        repeats=options.repeats or (2 if options.quick else 5 if small else 7),
        trial_seconds=0.01 if options.quick else 0.1 if small else 0.05,
        copy_bytes=2**24 if options.quick else 2**27 if small else 2**30,
        matmul_size=256 if options.quick else 1024 if small else 8192,
    )


def _figure(directory: Path, program: str) -> int:
    from pallas_kernels.bench.report import read_trials, summarise
    from pallas_kernels.bench.roofline import draw

    summaries = summarise(read_trials(directory))
    try:
        written = draw(summaries, directory / "figures")
    except ModuleNotFoundError:
        print(f"no figure: matplotlib is not installed; where it is, `{program} --figure {directory}` draws it")
        return 0
    print(f"figure: {written[0]} and .pdf")
    return 0


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_number, text.split(",")))


def _page_sizes(text: str) -> tuple[int, ...]:
    sizes = _numbers(text)
    if max(sizes) > 512:
        raise argparse.ArgumentTypeError(f"a page has 1 to 512 tokens, not {max(sizes)}")
    return sizes


def _names(text: str) -> tuple[str, ...]:
    for name in text.split(","):
        if name not in IMPLEMENTATIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(IMPLEMENTATIONS)}")
    return tuple(dict.fromkeys(text.split(",")))


def _tiles(text: str) -> tuple[tuple[int, int] | None, ...]:
    found: list[tuple[int, int] | None] = []
    for part in text.split(","):
        sizes = part.split("x")
        if part != "default" and len(sizes) != 2:
            raise argparse.ArgumentTypeError(f"{part!r} is neither QxK, such as 16x64, nor default")
        found.append(None if part == "default" else (_number(sizes[0]), _number(sizes[1])))
    return tuple(found)


def _heads(text: str) -> tuple[int, int, int]:
    numbers = _numbers(text)
    if len(numbers) != 3 or numbers[0] % numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not Hq,Hkv,D with Hq a multiple of Hkv, such as 32,8,128")
    return numbers[0], numbers[1], numbers[2]


if __name__ == "__main__":
    sys.exit(main())
