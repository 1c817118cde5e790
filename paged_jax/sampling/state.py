"""What the sampler remembers of each running request: rows on the device, indexed by the request's slot."""

from dataclasses import dataclass, replace
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32, UInt32


# unchecked: JAX rebuilds the tree around leaves of any kind, such as shapes
@no_type_check
@partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_data", "temperature", "top_k", "top_p", "min_p", "last_token"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SamplingState:
    """One row per slot or, once gathered, per row of a batch: `SamplingParams` on the device."""

    key_data: UInt32[Array, "rows 2"]
    """The request's 64-bit seed as (high, low) words."""
    temperature: Float32[Array, "rows"]
    """0 is greedy."""
    top_k: Int32[Array, "rows"]
    """Below 1 or from the vocabulary's size up is off."""
    top_p: Float32[Array, "rows"]
    """1 is off."""
    min_p: Float32[Array, "rows"]
    """0 is off."""
    last_token: Int32[Array, "rows"]
    """The newest token, the input of the next decode."""


def init_sampling_state(num_slots: int) -> SamplingState:
    """Greedy rows for every slot."""
    return SamplingState(
        key_data=jnp.zeros((num_slots, 2), jnp.uint32),
        temperature=jnp.zeros(num_slots, jnp.float32),
        top_k=jnp.zeros(num_slots, jnp.int32),
        top_p=jnp.ones(num_slots, jnp.float32),
        min_p=jnp.zeros(num_slots, jnp.float32),
        last_token=jnp.zeros(num_slots, jnp.int32),
    )


def admit(state: SamplingState, slot_ids: Int[Array, "N"], rows: SamplingState) -> SamplingState:
    """Write the rows of N requests that have been given a slot.

    Slots are 0 to num_slots - 1 and do not repeat; the padding's is num_slots, which is written nowhere.
    """
    return jax.tree.map(lambda slots, new: slots.at[slot_ids].set(new, mode="drop"), state, rows)


def gather(state: SamplingState, slot_ids: Int[Array, "S"]) -> SamplingState:
    """The rows of a batch by slot; padding (slot num_slots) gets zeros, that is, greedy rows."""
    return jax.tree.map(lambda slots: slots.at[slot_ids].get(mode="fill", fill_value=0), state)


def record(state: SamplingState, slot_ids: Int[Array, "S"], tokens: Int[Array, "S"]) -> SamplingState:
    """Remember the tokens just chosen (int32) as their slots' last; padding (slot num_slots) is dropped."""
    return replace(state, last_token=state.last_token.at[slot_ids].set(tokens, mode="drop"))
