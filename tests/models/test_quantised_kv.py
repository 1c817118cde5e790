"""What keys and values of 8 bits do to the logits of a real model: what the engine cannot measure of claim 12."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from dense_reference import DenseReference

from paged_jax.checkpoints.resolve import resolve
from paged_jax.experiments.workloads import shipped_prompts
from paged_jax.models.weights import load_decoder

GREATEST = {"int8": 127.0, "float8": 448.0}
NUM_PROMPTS, LENGTH = 4, 64


class RoundedReference(DenseReference):
    """Each token's row of each head is stored in 8 bits, with a scale of its own."""

    dtype = "int8"

    def _stored(self, rows: np.ndarray) -> np.ndarray:
        scale = np.abs(rows).max(axis=-1, keepdims=True) / GREATEST[self.dtype]
        scaled = rows / np.where(scale == 0, 1.0, scale)
        if self.dtype == "int8":
            return np.rint(scaled) * scale
        return scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


@pytest.mark.slow
def test_logits_of_a_real_model_hardly_change(smollm2_path: Path) -> None:
    """The numbers are those of docs/claims.md: mean divergence in nats, and how often the best token stays."""
    checkpoint = resolve(str(smollm2_path), "auto")
    decoder = load_decoder(checkpoint.config, checkpoint.tensors, np.dtype("float32"))
    exact, rounded = DenseReference(decoder), RoundedReference(decoder)
    prompts = sorted((checkpoint.tokenizer.encode(text) for text in shipped_prompts()), key=len)[-NUM_PROMPTS:]
    prompts = [prompt[:LENGTH] for prompt in prompts]
    expected = [_log_softmax(exact.logits(prompt)) for prompt in prompts]
    measured = {}
    for dtype in GREATEST:
        rounded.dtype = dtype
        pairs = [(e, _log_softmax(rounded.logits(p))) for e, p in zip(expected, prompts, strict=True)]
        divergence = np.concatenate([(np.exp(e) * (e - r)).sum(axis=1) for e, r in pairs])
        kept = np.concatenate([e.argmax(axis=1) == r.argmax(axis=1) for e, r in pairs])
        largest = max(np.abs(e - r)[e > np.log(0.01)].max() for e, r in pairs)
        measured[dtype] = divergence.mean(), kept.mean(), largest
        print(dtype, len(kept), measured[dtype])
    assert 0 < measured["int8"][0] < measured["float8"][0] < 0.05
    assert measured["float8"][1] > 0.9


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
