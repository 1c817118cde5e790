"""Puts a checkpoint's tensors, or random ones, into a decoder."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder

type ReadTensor = Callable[[str, tuple[int, ...]], jax.Array]


def load_decoder(config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: jnp.dtype) -> Decoder:
    """A decoder with the checkpoint's weights, cast to `dtype`.

    `tensors` are under Hugging Face names. Raises ValueError naming a tensor that is missing, superfluous or of the
    wrong shape. A head that repeats tied embeddings is accepted when it equals them.
    """
    used: set[str] = set()

    def read(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name not in tensors:
            raise ValueError(f"the checkpoint has no tensor {name!r}, which this model needs with shape {shape}")
        array = tensors[name]
        if array.shape != shape:
            raise ValueError(f"tensor {name!r} has shape {array.shape}, but this model's config says {shape}")
        used.add(name)
        return jnp.asarray(array, dtype)

    decoder = _fill(config, dtype, read)
    extra = sorted(set(tensors) - used)
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        if not np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            raise ValueError("config says tied embeddings, but tensor 'lm_head.weight' differs from the embeddings")
        extra.remove("lm_head.weight")
    if extra:
        others = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ValueError(f"the checkpoint has a tensor {extra[0]!r}{others} that this model has no place for")
    return decoder


def dummy_decoder(config: ModelConfig, seed: int, dtype: jnp.dtype) -> Decoder:
    """A decoder with normal random weights of variance 1 / fan-in; norms are 1 and biases 0."""
    key = jax.random.key(seed)

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        nonlocal key
        if len(shape) == 1:
            return (jnp.ones if "norm" in name else jnp.zeros)(shape, dtype)
        key, own = jax.random.split(key)
        return jax.random.normal(own, shape, dtype) * jnp.asarray(shape[1] ** -0.5, dtype)

    return _fill(config, dtype, draw)


def _fill(config: ModelConfig, dtype: jnp.dtype, read: ReadTensor) -> Decoder:
    """A decoder whose parameters come from `read`; nothing is allocated twice."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype)))
    state = jax.tree_util.tree_map_with_path(lambda path, leaf: read(_tensor_name(path), leaf.shape), abstract)
    return nnx.merge(graph, state)


def _tensor_name(path: jax.tree_util.KeyPath) -> str:
    """A parameter's name in the checkpoint: its path, since the decoder's attributes are named after it."""
    name = ".".join(str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey))
    return name if name.startswith("lm_head") else f"model.{name}"
