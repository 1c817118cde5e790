"""Measured times of a layer's parts, as Vidur publishes them (Agrawal et al., MLSys 2024), for fitting a device.

Two kinds of CSV, times in milliseconds: `mlp.csv`, products and elementwise kernels by number of tokens and
tensor-parallel degree, and `attention.csv`, decodes by batch and cached tokens and prompts by chunk and cached tokens.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from paged_jax.execution.plan import ScheduledRequest
from paged_jax.simulation.attention_cost import AttentionCost
from paged_jax.simulation.elementwise import elementwise_seconds
from paged_jax.simulation.fit import Parameter, Sample, Stage
from paged_jax.simulation.gemm import gemm_seconds
from paged_jax.simulation.hardware import Hardware
from paged_jax.simulation.layer_shapes import split
from paged_jax.simulation.model_shape import DTYPE_BYTES, ModelShape

DTYPE = "float16"
"""Of everything that was profiled."""
MEASURED = ".median"
"""Statistic of the repetitions that is fitted."""
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
ELEMENTWISE = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act")
"""Not `emb`, a gather that the cost model counts as bytes, and not `add`, which it takes to be part of the norm."""
DECODE, PREFILL = "attn_decode", "attn_prefill"
MLP_COLUMNS = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp", "num_tokens")
ATTENTION_COLUMNS = ("n_embd", "n_q_head", "n_kv_head", "block_size", "batch_size", "prefill_chunk_size")
CACHED, TP, IS_PREFILL = "kv_cache_size", "num_tensor_parallel_workers", "is_prefill"

PROFILE_STAGES = (
    Stage(ELEMENTWISE, (Parameter("elementwise_bandwidth_efficiency", 0.05, 1.0), Parameter("kernel_s", 0.0, 2e-5))),
    Stage(
        PRODUCTS,
        (
            Parameter("gemm_tiles.0.efficiency", 0.1, 1.0),
            Parameter("gemm_tiles.1.efficiency", 0.1, 1.0),
            Parameter("gemm_tiles.2.efficiency", 0.1, 1.0),
            Parameter("gemm_bandwidth_efficiency", 0.3, 1.0),
            Parameter("overlap", 1.0, 20.0),
        ),
    ),
    Stage(
        (DECODE,),
        (Parameter("attention_bandwidth_efficiency", 0.1, 1.0), Parameter("attention_decode_s", 0.0, 1e-4)),
    ),
    Stage(
        (PREFILL,),
        (
            Parameter("attention_flops_efficiency", 0.05, 1.0),
            Parameter("attention_saturation_tokens", 0.0, 1e4),
            Parameter("attention_masked_share", 0.0, 1.0),
            Parameter("attention_chunk_s", 0.0, 1e-4),
        ),
    ),
)
"""What each part of the profiles decides."""


def read_profiles(directory: str) -> list[Sample]:
    """Samples of every mlp.csv and attention.csv below the directory; rows of one shape become their median.

    Raises ValueError for a directory without such files, and for files without the columns that are read.
    """
    root = Path(directory)
    samples: list[Sample] = []
    for path in sorted(root.rglob("mlp.csv")):
        samples.extend(_mlp_samples(path))
    for path in sorted(root.rglob("attention.csv")):
        samples.extend(_attention_samples(path))
    if not samples:
        raise ValueError(f"no mlp.csv or attention.csv below {directory!r}: give the folder of Vidur's profiles")
    return samples


def _mlp_samples(path: Path) -> Iterator[Sample]:
    shapes = (*MLP_COLUMNS, TP)
    for row in _medians(path, shapes, (*PRODUCTS, *ELEMENTWISE)):
        hidden, tokens, tp = int(row["n_embd"]), int(row["num_tokens"]), int(row[TP])
        head_dim = hidden // int(row["n_head"])
        queries = split(int(row["n_head"]), tp) * head_dim
        keys = split(int(row["n_kv_head"]), tp) * head_dim
        inner, up = split(int(row["n_expanded_embd"]), tp), 2 if row["use_gated_mlp"] else 1
        products = {
            "attn_pre_proj": (hidden, queries + 2 * keys),
            "attn_post_proj": (queries, hidden),
            "mlp_up_proj": (hidden, up * inner),
            "mlp_down_proj": (inner, hidden),
        }
        for part, (rows, columns) in products.items():
            predict = partial(_product, tokens, rows, columns)
            yield Sample(part, (tokens, rows, columns), _seconds(row, part), predict)
        elements = {
            "input_layernorm": 3 * hidden,  # read for the mean square, read again to be scaled, written
            "post_attention_layernorm": 3 * hidden,
            "attn_rope": 2 * (queries + keys),
            "mlp_act": (up + 1) * inner,
        }
        for part, width in elements.items():
            predict = partial(elementwise_seconds, num_bytes=tokens * width * DTYPE_BYTES[DTYPE])
            yield Sample(part, (tokens, width), _seconds(row, part), predict)


def _attention_samples(path: Path) -> Iterator[Sample]:
    shapes = (*ATTENTION_COLUMNS, CACHED, TP, IS_PREFILL)
    for row in _medians(path, shapes, (DECODE, PREFILL)):
        heads, block_size, tp = int(row["n_q_head"]), int(row["block_size"]), int(row[TP])
        shape = ModelShape(
            vocab_size=1,
            hidden_size=int(row["n_embd"]),
            intermediate_size=1,
            num_layers=1,
            num_heads=heads,
            num_kv_heads=int(row["n_kv_head"]),
            head_dim=int(row["n_embd"]) // heads,
            max_position_embeddings=1,
        )
        cached, batch, chunk = int(row[CACHED]), int(row["batch_size"]), int(row["prefill_chunk_size"])
        if row[IS_PREFILL]:
            chunks = (ScheduledRequest(None, cached, chunk, False),) * batch  # type: ignore[arg-type]
            part, contexts = PREFILL, ()
        else:
            part, contexts, chunks = DECODE, (cached + 1,) * batch, ()
        predict = partial(_attention, shape, block_size, tp, contexts, chunks)
        yield Sample(part, (batch, chunk, cached, heads, tp, block_size), _seconds(row, part), predict)


def _product(tokens: int, inner: int, columns: int, hardware: Hardware) -> float:
    return gemm_seconds(hardware, DTYPE, DTYPE_BYTES[DTYPE], tokens, inner, columns)


def _attention(
    shape: ModelShape,
    block_size: int,
    tp: int,
    contexts: tuple[int, ...],
    chunks: tuple[ScheduledRequest, ...],
    hardware: Hardware,
) -> float:
    cost = AttentionCost(
        hardware,
        shape,
        window=None,
        block_size=block_size,
        dtype=DTYPE,
        kv_dtype=DTYPE,
        tensor_parallel_size=tp,
    )
    return cost.seconds(contexts, chunks)


def _medians(path: Path, shapes: tuple[str, ...], parts: tuple[str, ...]) -> Iterator[dict[str, float]]:
    """The file's rows, those of one shape brought together."""
    import pandas as pd  # a second that importing the module need not wait for

    table = pd.read_csv(path)
    times = [f"time_stats.{part}{MEASURED}" for part in parts]
    missing = [name for name in (*shapes, *times) if name not in table]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(map(repr, missing))}: it is not a profile of this kind")
    grouped = table.groupby(list(shapes), sort=True)[times].median().reset_index()
    yield from grouped.to_dict("records")


def _seconds(row: dict[str, float], part: str) -> float:
    return row[f"time_stats.{part}{MEASURED}"] / 1e3
