"""Deviceless ahead-of-time compilation: every kernel through the real compilers, on a machine without a GPU or TPU.

It finds what interpreters accept and a chip does not: tiles, alignments, shared memory, vector memory, registers. It
needs the `aot` extra, in an environment of its own:

    uv run --extra aot python -m pallas_kernels.aot --output kernels.md

compiles every kernel over {bfloat16, float32, quantised pages} x {page 1, 8, 16, 64, 128} x {head_dim 64, 128} x
{decode, mixed} for an H200 and four TPUs, and writes a Markdown table of what each needs. A register that spills is a
failure.
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from pallas_kernels.kv_pages import page_shape, write_kv_pages
from pallas_kernels.paged_attention import ragged_paged_attention

# What XLA needs to know of an H200 (stream_executor's device description), from NVIDIA's data sheet and the CUDA
# programming guide's table of compute capability 9.0.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
runtime_version { major: 13 minor: 0 patch: 0 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""
_TPU_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
TARGETS = ("h200", *_TPU_TOPOLOGIES)
KERNELS = {"h200": ("mosaic_gpu", "triton"), **dict.fromkeys(_TPU_TOPOLOGIES, ("mosaic_tpu", "mosaic_tpu_write"))}
"""What is compiled for each target; `mosaic_tpu_write` stores keys and values."""


@dataclass(frozen=True)
class Case:
    """One kernel at one shape for one target."""

    target: str
    kernel: str
    dtype: str
    """Of queries, and of pages unless `kv_dtype` says otherwise."""
    kv_dtype: str
    block_size: int
    head_dim: int
    batch: str
    """"decode": 64 sequences with one query each; "mixed": 128 queries of up to 32 sequences; "long": 2 decodes."""
    features: str = "none"
    """"all": a traced window, a soft cap, sinks and ALiBi slopes."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs; None for what its target does not have or does not say."""

    registers: int | None
    """Per thread."""
    spilled_bytes: int | None
    """Per thread."""
    memory_bytes: int | None
    """Shared memory of a block (GPU) or vector memory (TPU)."""
    temporary_bytes: int
    """Device memory beside arguments and results, of the whole call."""
    seconds: float
    """To lower and compile."""


def all_cases(targets: Sequence[str] = TARGETS) -> list[Case]:
    """The whole grid: the plain kernels, and with all features wider heads, odd pages and long decodes (whose keys are
    split on a GPU). Page size 8 is quantised as fp8 and the others as int8."""
    types = [("bfloat16", False), ("float32", False), ("bfloat16", True)]
    plain = ((1, 8, 16, 64, 128), (64, 128), ("decode", "mixed"), ("none",))
    featured = ((5, 16, 512), (64, 128, 256), ("mixed", "long"), ("all",))
    cases = []
    for target in targets:
        grid = [*itertools.product(KERNELS[target], types, *plain)]
        grid += itertools.product([k for k in KERNELS[target] if not k.endswith("write")], types, *featured)
        for kernel, (dtype, is_quantized), block_size, head_dim, batch, features in grid:
            if kernel == "mosaic_tpu_write" and batch == "decode":  # a token is a token to it
                continue
            quantized = "float8_e4m3fn" if block_size == 8 else "int8"
            kv_dtype = quantized if is_quantized else dtype
            cases.append(Case(target, kernel, dtype, kv_dtype, block_size, head_dim, batch, features))
    return cases


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """For each kernel a subset in which every pair of two fields' values occurs: greedy, always the same one."""
    names = [field.name for field in fields(Case)]
    kernels = dict.fromkeys(case.kernel for case in cases)
    if len(kernels) > 1:
        return [case for kernel in kernels for case in pairwise([c for c in cases if c.kernel == kernel])]

    def pairs(case: Case) -> set[tuple[str, object, str, object]]:
        values = [(name, getattr(case, name)) for name in names]
        return {(*a, *b) for a, b in itertools.combinations(values, 2)}

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def unavailable(target: str) -> str | None:
    """Why nothing can be compiled for a target here, or None."""
    if target != "h200":
        missing = [] if importlib.util.find_spec("libtpu") else ["libtpu"]
    else:
        # without libdevice the compiler ends the process, so it is looked for first
        found = {
            "jax-cuda13-plugin": importlib.util.find_spec("jax_cuda13_plugin") is not None,
            "nvidia-cuda-nvcc": _ptxas().exists(),
            "nvidia-nvvm": bool(list(_cuda_folder().glob("nvvm/libdevice/*.bc"))),
        }
        missing = [name for name, is_there in found.items() if not is_there]
    return f"no {' and no '.join(missing)} here: install the extra aot" if missing else None


def compile_for(
    target: str, function: Callable[..., object], *arguments: object, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compile a function for one chip of a target; `arguments` are pytrees of arrays or of their shapes.

    Raises what the compiler raises; a kernel of XLA's whose registers spill is an error on a GPU.
    """
    mesh = _mesh(target)
    sharding = NamedSharding(mesh, PartitionSpec())

    def abstract(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(abstract, arguments))
    options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True} if target == "h200" else None
    return lowered.compile(compiler_options=options)


def compile_case(case: Case, folder: Path) -> Resources:
    """Compile one case and read what it needs off the compilers' own reports in `folder` (of `compilers_reports`).

    Raises:
        RuntimeError: when registers spill, or when Mosaic GPU does not say whether they do.
    """
    function, arguments = _call(case)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    start = time.perf_counter()
    compiled = compile_for(case.target, function, *arguments, donate=(0,) if case.kernel.endswith("write") else ())
    seconds = time.perf_counter() - start
    registers, spilled, memory = _read_reports(folder) if case.target == "h200" else (None, None, _vmem(compiled))
    if spilled is None and case.kernel == "mosaic_gpu":
        raise RuntimeError(f"no report on the registers of {case}: look for what changed in MOSAIC_GPU_DUMP_PTXAS")
    if spilled:
        raise RuntimeError(f"{case.kernel} spills {spilled} bytes of registers for each thread: {case}")
    return Resources(registers, spilled, memory, compiled.memory_analysis().temp_size_in_bytes, seconds)


def _call(case: Case) -> tuple[Callable[..., object], list[jax.ShapeDtypeStruct | None]]:
    """32 query heads on 8 KV heads, contexts of up to 4096 tokens: the function and its arguments."""
    num_heads, num_kv_heads, layers = 32, 8, 2
    num_tokens, num_rows = {"decode": (64, 64), "mixed": (128, 32), "long": (2, 2)}[case.batch]
    # a page size of 1 with the longest contexts would not fit a TPU's scalar memory, which is a refusal of its own
    width = min(-(-4096 // case.block_size), 1024)
    blocks_per_layer = 1 + 4 * width
    dtype, kv_dtype, int32 = jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype), jnp.dtype("int32")
    page = page_shape(
        "gpu" if case.target == "h200" else "tpu",
        block_size=case.block_size,
        num_kv_heads=num_kv_heads,
        head_dim=case.head_dim,
        dtype=kv_dtype,
    )
    pages = jax.ShapeDtypeStruct((layers * blocks_per_layer, *page), kv_dtype)
    if case.kernel == "mosaic_tpu_write":
        rows = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, case.head_dim), kv_dtype)
        where = jax.ShapeDtypeStruct((num_tokens,), int32)
        write = partial(write_kv_pages, layer=1, blocks_per_layer=blocks_per_layer, implementation="mosaic_tpu")
        return write, [pages, rows, rows, where, where]

    def attend(q, kv_pages, kv_lens, block_tables, cu_q_lens, num_seqs, kv_scales, window, sinks, slopes):
        return ragged_paged_attention(
            q,
            kv_pages,
            kv_lens,
            block_tables,
            cu_q_lens,
            num_seqs,
            layer=1,
            blocks_per_layer=blocks_per_layer,
            num_kv_heads=num_kv_heads,
            scale=case.head_dim**-0.5,
            sliding_window=window,
            logit_soft_cap=None if window is None else 30.0,
            sinks=sinks,
            alibi_slopes=slopes,
            kv_scales=kv_scales,
            implementation=case.kernel,
        )

    scales = None if case.kv_dtype == case.dtype else jax.ShapeDtypeStruct(pages.shape[:3], jnp.dtype("float32"))
    shapes = [(num_rows,), (num_rows, width), (num_rows + 1,), (1,)]
    q = jax.ShapeDtypeStruct((num_tokens, num_heads, case.head_dim), dtype)
    features = [None] * 3
    if case.features == "all":
        by_head = jax.ShapeDtypeStruct((num_heads,), jnp.dtype("float32"))
        features = [jax.ShapeDtypeStruct((), int32), by_head, by_head]
    return attend, [q, pages, *(jax.ShapeDtypeStruct(shape, int32) for shape in shapes), scales, *features]


@cache
def _mesh(target: str) -> Mesh:
    problem = unavailable(target)
    if problem is not None:
        raise RuntimeError(problem)
    if target == "h200":
        topology = topologies.get_topology_desc(platform="cuda", target_config=_H200, topology="1x1x1")
    else:
        # without these libtpu asks a metadata server, and a lock file keeps other processes out
        for name, value in {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }.items():
            os.environ.setdefault(name, value)
        topology = topologies.get_topology_desc(_TPU_TOPOLOGIES[target], "tpu")
    return Mesh(np.array(topology.devices[:1]), ("device",))


def _cuda_folder() -> Path:
    """Where NVIDIA's wheels put the toolkit: XLA looks there first."""
    return Path(jax.__file__).parents[1] / "nvidia" / "cu13"


def _ptxas() -> Path:
    return _cuda_folder() / "bin" / "ptxas"


@contextlib.contextmanager
def compilers_reports(*, of_xla: bool = False) -> Iterator[Path]:
    """A temporary folder for what Mosaic GPU reports of its kernels, and XLA of its own if `of_xla`.

    XLA reads its flags when JAX first compiles anything, and only then: `of_xla` is for a process of its own.
    """
    settings = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
    with tempfile.TemporaryDirectory() as name:
        settings["MOSAIC_GPU_DUMP_TO"] = name
        if of_xla:
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={name} --xla_dump_emitter_re=ptx"
            settings["XLA_FLAGS"] = flags.strip()
        before = {key: os.environ.get(key) for key in settings}
        os.environ.update(settings)
        try:
            yield Path(name)
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


def _read_reports(folder: Path) -> tuple[int | None, int | None, int | None]:
    """Registers, spilled bytes and shared memory of the attention kernel, the largest of each."""
    logs = [path.read_text() for path in folder.glob("*.ptxas")]
    for path in folder.glob("module_*.ptx"):
        if "ragged_paged_attention" in path.read_text():
            command = [str(_ptxas()), "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
            logs.append(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
    text = "\n".join(logs)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", text)]
    found = [
        (pattern, path.read_text())
        for pattern, files in (
            (r"smem_scratch_bytes=(\d+)", "*resources.txt"),
            (r"ragged_paged_attention.*shared_memory: (\d+)", "*.thunk_sequence.txt"),
        )
        for path in folder.glob(files)
    ]
    memory = [int(n) for pattern, text in found for n in re.findall(pattern, text)]
    return max(registers, default=None), max(spilled, default=None), max(memory, default=None)


def _vmem(compiled: jax.stages.Compiled) -> int | None:
    """Vector memory that the Mosaic kernels of a TPU program use, of all of them the most."""
    used = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"'
    calls = [line for line in compiled.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return max((int(n) for line in calls for n in re.findall(used, line)), default=None)


def _row(case: Case, result: Resources | str) -> str:
    name = case.dtype if case.kv_dtype == case.dtype else f"{case.dtype}, {case.kv_dtype} pages"
    cells = [case.target, case.kernel, name, str(case.block_size), str(case.head_dim), case.batch, case.features]
    if isinstance(result, str):
        cells += ["", "", "", "", result]
    else:
        memory = "" if result.memory_bytes is None else f"{result.memory_bytes / 1024:.0f}"
        registers = "" if result.registers is None else str(result.registers)
        cells += [registers, memory, f"{result.temporary_bytes / 2**20:.1f}", f"{result.seconds:.1f}", "compiles"]
    return f"| {' | '.join(cells)} |"


_HEADER = (
    "| target | kernel | types | page | head_dim | batch | features "
    "| registers | memory, KiB | temporary, MiB | seconds | |\n"
    "|---|---|---|--:|--:|---|---|--:|--:|--:|--:|---|"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the number of cases that do not compile, at most 1."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot",
        description="Compile every kernel for GPUs and TPUs that are not here, and write a Markdown table of "
        "registers, shared memory (GPU) or vector memory (TPU), temporaries and compile times. Needs the extra aot.",
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, help="default: all")
    parser.add_argument("--pairwise", action="store_true", help="only the subset that CI compiles")
    parser.add_argument("--output", type=Path, help="file for the table; default: standard output")
    options = parser.parse_args(arguments)
    for target in options.targets:
        problem = unavailable(target)
        if problem is not None:
            parser.error(f"{target}: {problem}")
    cases = all_cases(options.targets)
    if options.pairwise:
        cases = pairwise(cases)
    rows, failures, start = [_HEADER], 0, time.monotonic()
    with compilers_reports(of_xla=True) as folder:
        for done, case in enumerate(cases):
            try:
                result: Resources | str = compile_case(case, folder)
            except Exception as error:  # whatever a compiler says against a kernel belongs in the table
                failures += 1
                result = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".replace("|", "/")
            rows.append(_row(case, result))
            left = (time.monotonic() - start) / (done + 1) * (len(cases) - done - 1)
            print(
                f"\r{done + 1}/{len(cases)} compiled, {failures} failed, {left / 60:.0f} min left ",
                end="",
                file=sys.stderr,
            )
    print(file=sys.stderr)
    table = "\n".join(rows) + "\n"
    if options.output:
        options.output.write_text(table)
    else:
        print(table)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
