"""A device as the cost model sees it: datasheet figures, efficiencies, and fixed costs."""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from paged_jax.config import StrictModel, nearest, parse

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class GemmTile(StrictModel):
    """A piece of a product that one core computes whole, even where it hangs over the edge."""

    rows: Count
    """Of the activations, which is to say tokens."""
    columns: Count
    """Of the weights."""
    efficiency: Share
    """Share of the peak that cores reach which are all busy with such tiles."""


class Hardware(StrictModel):
    """One device and its links. Bytes, seconds, bytes/s and FLOP/s; peaks are dense, without structured sparsity."""

    name: str
    kind: Literal["gpu", "tpu", "cpu"]
    num_cores: Count
    """Parts that work side by side: streaming multiprocessors, TensorCores, CPU cores."""
    memory_bytes: Count
    memory_bandwidth: Positive
    peak_flops: dict[str, Positive]
    """By data type."""
    fast_memory_bytes: Count | None = None
    """What a kernel's tiles must fit in: a core's shared memory on a GPU, its VMEM on a TPU, its L2 on a CPU."""
    scalar_memory_bytes: Count | None = None
    """What a kernel's block tables must fit in: a TensorCore's SMEM. None: tables are read from main memory."""

    gemm_tiles: Annotated[tuple[GemmTile, ...], Field(min_length=1)]
    """To choose from: the quickest one for the shape."""
    gemm_bandwidth_efficiency: Share
    overlap: Annotated[float, Field(ge=1)]
    """How computing hides behind reading, in products and attention: p of (compute^p + memory^p)^(1/p). 1: not at all,
    they add up; a large one: wholly, the longer one counts."""
    elementwise_bandwidth_efficiency: Share

    attention_flops_efficiency: Share
    """Towards which prompts tend as they see more keys."""
    attention_saturation_tokens: NotNegative
    """Keys that a prompt's tokens see on average when half of that is reached."""
    attention_masked_share: Annotated[float, Field(ge=0, le=1)]
    """Of the pairs of a prompt's tokens above the diagonal, which causality masks, the share that the kernel computes
    all the same. 0: it skips them; 1: it computes the whole rectangle."""
    attention_bandwidth_efficiency: Share
    """Of decodes over contiguous memory."""
    page_overhead_bytes: NotNegative
    """What could be read in the time that a page costs besides its bytes: its table entry, starting its copy."""
    attention_tile_tokens: Count
    """Keys that the kernel works on at a time. Of a page that is larger it copies as many at a time, each copy with its
    overhead."""
    attention_longest: bool = False
    """Whether all decodes of a step, padding included, take as long as the one with the longest context: a kernel of
    whole arrays."""
    attention_decode_s: NotNegative
    """Fixed time of one layer's attention of decodes."""
    attention_chunk_s: NotNegative
    """And of prompts."""

    kernel_s: NotNegative
    """Fixed time of each kernel but attention's."""
    kernel_launch_s: NotNegative
    """Host time to launch one kernel by itself (eager)."""
    step_launch_s: NotNegative
    """Host time to launch one compiled step."""
    host_step_s: NotNegative
    """Host time of a compiled step besides: scheduling, the batch, the result."""
    host_request_s: NotNegative
    """And for each request in it."""
    eager_host_step_s: NotNegative
    """The same of an eager engine."""
    eager_host_request_s: NotNegative

    host_link_bandwidth: Positive
    """To host memory, each direction."""
    host_link_latency_s: NotNegative
    """Of each transfer."""
    link_bandwidth: Positive | None = None
    """To the other devices of a tensor-parallel group, each direction, all links of a device together."""
    link_latency_s: NotNegative | None = None
    """Of each hop of a collective."""
    link_devices: Annotated[int, Field(ge=2)] | None = None
    """Most devices that these links join; between more, a slower network would have to be counted."""

    def flops(self, dtype: str) -> float:
        """Peak for a data type. Raises ValueError when none is known."""
        if dtype not in self.peak_flops:
            raise ValueError(
                f"hardware {self.name!r} has no peak_flops for dtype {dtype!r}; known: {', '.join(self.peak_flops)}"
            )
        return self.peak_flops[dtype]


def hardware_names() -> tuple[str, ...]:
    """The catalogue's devices, by name."""
    return tuple(sorted(_files()))


def load_hardware(name_or_path: str) -> Hardware:
    """A device of the catalogue, or of a file that ends in .yaml (as `paged-jax calibrate` writes it).

    Raises ValueError, one sentence, when there is none or the file is not a device.
    """
    if name_or_path.endswith(".yaml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise ValueError(f"no hardware file {name_or_path!r}: `paged-jax calibrate` writes one")
        return _parse(path.read_text(encoding="utf-8"), name_or_path)
    return _catalogued(name_or_path)


@cache
def _catalogued(name: str) -> Hardware:
    files = _files()
    if name not in files:
        raise ValueError(
            f"no hardware {name!r} in the catalogue{nearest(name, list(files))} (or give a file that ends in .yaml)"
        )
    hardware = _parse(files[name].read_text(encoding="utf-8"), f"catalogue file {name}.yaml")
    if hardware.name != name:
        raise ValueError(f"catalogue file {name}.yaml calls itself {hardware.name!r}: name and file must agree")
    return hardware


def _files() -> dict[str, Any]:
    folder = resources.files("paged_jax.catalog").joinpath("hardware")
    return {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name.endswith(".yaml")}


def _parse(text: str, where: str) -> Hardware:
    from paged_jax.experiments.yaml_values import read_yaml, with_tuples

    values = read_yaml(text, where)
    if not isinstance(values, dict):
        raise ValueError(f"{where} is not a mapping of hardware fields")
    try:
        return parse(Hardware, with_tuples(values))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
