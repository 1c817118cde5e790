"""Seconds of a call, and the two roofs: how fast arrays are copied and matrices multiplied on this device."""

import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_MOST_CALLS = 10_000


def seconds_per_call(run: Callable[[int], object], calls: int) -> float:
    """Mean seconds of `calls` calls in a row."""
    began = time.perf_counter()
    run(calls)
    return (time.perf_counter() - began) / calls


def calibrate(run: Callable[[int], object], seconds: float) -> int:
    """Warm up, and find how many calls fill `seconds`."""
    run(1)
    calls, taken = 1, seconds_per_call(run, 1)
    while taken * calls < seconds and calls < _MOST_CALLS:
        calls = min(_MOST_CALLS, max(2 * calls, math.ceil(1.1 * seconds / taken)))
        taken = seconds_per_call(run, calls)
    return calls


def copier(num_bytes: int) -> tuple[Callable[[int], object], int]:
    """n passes that read a large array and write it, and the bytes that one pass reads and writes.

    In place, since a fresh array would cost a CPU its page faults.
    """
    array = jnp.zeros(num_bytes // 4, jnp.int32)
    moved = 2 * array.nbytes
    step = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run(n: int) -> None:
        nonlocal array
        for _ in range(n):
            array = step(array)
        jax.block_until_ready(array)

    return run, moved


def multiplier(platform: str, size: int) -> tuple[Callable[[int], object], int]:
    """n products of square matrices, in bfloat16 on accelerators, and the operations of one."""
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    weights = jax.random.normal(jax.random.key(0), (size, size), dtype) * jnp.asarray(size**-0.5, dtype)
    loop = jax.jit(lambda n, x: lax.fori_loop(0, n, lambda _, x: x @ weights, x))
    return (lambda n: jax.block_until_ready(loop(jnp.int32(n), weights))), 2 * size**3
