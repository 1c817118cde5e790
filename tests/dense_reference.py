"""The reference R: a dense forward over the whole sequence in float64 numpy: no cache, batch, pages, JAX."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder

MIN_GAP = 1e-3
"""A case in which the two best logits are closer than this decides nothing."""


class DenseReference:
    """A Llama decoder written down from its formulas, on the weights of a `Decoder`; layers may have a window."""

    def __init__(self, decoder: Decoder) -> None:
        self._config = decoder.config
        self._decoder = decoder
        self._greedy = cache(self._greedy_uncached)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Scores of the token after each of `token_ids`: float64 [T, vocab]."""
        decoder, config = self._decoder, self._config
        x = _weight(decoder.embed_tokens)[list(token_ids)]
        for layer, window in zip(decoder.layers, config.layer_windows, strict=True):
            x = x + self._attention(layer.self_attn, _rms_norm(layer.input_layernorm, x, config), window)
            y = _rms_norm(layer.post_attention_layernorm, x, config)
            gate, up = _linear(layer.mlp.gate_proj, y), _linear(layer.mlp.up_proj, y)
            x = x + _linear(layer.mlp.down_proj, gate / (1 + np.exp(-gate)) * up)
        head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
        return _rms_norm(decoder.norm, x, config) @ _weight(head).T

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens after `prompt`. AssertionError for a prompt with a near tie: choose another."""
        tokens, gap = self._greedy(tuple(prompt), count)
        assert gap > MIN_GAP, f"the two best logits are {gap} apart: a case that decides nothing"
        return list(tokens)

    def prompts(self, lengths: Sequence[int], seed: int, count: int) -> list[tuple[int, ...]]:
        """Random prompts of these lengths, none of which has a near tie in its `count` greedy tokens."""
        rng, prompts = np.random.default_rng(seed), []
        while len(prompts) < len(lengths):
            prompt = tuple(rng.integers(0, self._config.vocab_size, lengths[len(prompts)]).tolist())
            if self._greedy(prompt, count)[1] > MIN_GAP:
                prompts.append(prompt)
        return prompts

    def _greedy_uncached(self, prompt: tuple[int, ...], count: int) -> tuple[tuple[int, ...], float]:
        tokens, gap = list(prompt), np.inf
        for _ in range(count):
            scores = self.logits(tokens)[-1]
            second, first = np.sort(scores)[-2:]
            gap = min(gap, first - second)
            tokens.append(int(np.argmax(scores)))
        return tuple(tokens[len(prompt) :]), gap

    def _stored(self, rows: np.ndarray) -> np.ndarray:
        """What is left of keys or values [T, heads, head_dim] in the cache: all of them."""
        return rows

    def _attention(self, attention: object, x: np.ndarray, window: int | None) -> np.ndarray:
        """Token i sees min(i + 1, window) tokens, the last of which is itself."""
        config, length = self._config, len(x)
        q = _linear(attention.q_proj, x).reshape(length, config.num_heads, config.head_dim)
        k = _linear(attention.k_proj, x).reshape(length, config.num_kv_heads, config.head_dim)
        v = _linear(attention.v_proj, x).reshape(length, config.num_kv_heads, config.head_dim)
        q, k = _rotate(q, config), _rotate(k, config)
        k, v = self._stored(k), self._stored(v)
        age = np.arange(length)[:, None] - np.arange(length)
        hidden = (age < 0) | (age >= (length if window is None else window))
        group = config.num_heads // config.num_kv_heads
        out = np.empty_like(q)
        for head in range(config.num_heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(config.head_dim)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group]
        return _linear(attention.o_proj, out.reshape(length, -1))


def _weight(layer: object) -> np.ndarray:
    return np.asarray(layer.weight[...], np.float64)


def _linear(layer: object, x: np.ndarray) -> np.ndarray:
    y = x @ _weight(layer).T
    return y if layer.bias is None else y + np.asarray(layer.bias[...], np.float64)


def _rms_norm(norm: object, x: np.ndarray, config: ModelConfig) -> np.ndarray:
    return _weight(norm) * x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + config.rms_norm_eps)


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    half = config.head_dim // 2
    angles = np.outer(np.arange(len(x)), config.rope_theta ** -(np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)
