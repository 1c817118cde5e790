"""Every kernel through the compilers of GPUs and TPUs that are not here: a pairwise subset; the whole grid is a command
(`python -m pallas_kernels.aot`)."""

import itertools
from dataclasses import astuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.aot import (
    TARGETS,
    all_cases,
    compile_case,
    compile_for,
    compilers_reports,
    main,
    pairwise,
    unavailable,
)


def needs_compilers(target: str) -> None:
    problem = unavailable(target)
    if problem is not None:
        pytest.skip(f"{target}: {problem}")


@pytest.mark.parametrize("case", pairwise(all_cases()), ids=lambda case: "-".join(map(str, astuple(case))))
def test_kernels_compile(case):
    """Registers that spill, memory that overflows, and what a tile cannot be, are errors here."""
    needs_compilers(case.target)
    with compilers_reports() as folder:
        resources = compile_case(case, folder)
    if case.target == "h200":
        # a spill of Triton's is the compiler's error; the registers of XLA's own PTX are only the command's to report
        assert resources.spilled_bytes == (0 if case.kernel == "mosaic_gpu" else None)
    else:
        assert resources.memory_bytes is not None


def test_pairwise_leaves_no_pair_out():
    cases = all_cases()
    chosen = pairwise(cases)
    assert len(chosen) < len(cases) / 5

    def pairs(some):
        return {pair for case in some for pair in itertools.combinations(enumerate(astuple(case)), 2)}

    assert pairs(chosen) == pairs(cases)


def test_the_compilers_are_real():
    """A kernel that reads HBM as if it were on the chip passes the interpreter, and no TPU compiler."""
    needs_compilers("v5e")

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def call(x):
        return pl.pallas_call(
            kernel,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=pltpu.CompilerParams(),
        )(x)

    with pytest.raises(Exception, match=r"(?i)memory"):
        compile_for("v5e", call, jax.ShapeDtypeStruct((8, 128), jnp.dtype("float32")))


@pytest.mark.parametrize("target", TARGETS)
def test_without_the_compilers_the_command_says_what_is_missing(target, capsys):
    if unavailable(target) is None:
        pytest.skip("the compilers are here")
    with pytest.raises(SystemExit):
        main(["--targets", target])
    assert "install the extra aot" in capsys.readouterr().err
