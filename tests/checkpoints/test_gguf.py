import math

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize

from paged_jax.checkpoints.gguf import GgufFile
from paged_jax.models.config import RopeScaling


def half(block: bytes) -> float:
    return float(np.frombuffer(block[:2], np.float16)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q8_0(block: bytes) -> list[float]:
    return [half(block) * signed(b) for b in block[2:]]


def q4_0(block: bytes) -> list[float]:
    return [half(block) * (q - 8) for q in [*(b & 15 for b in block[2:]), *(b >> 4 for b in block[2:])]]


def q4_1(block: bytes) -> list[float]:
    scale, least, packed = half(block), half(block[2:]), block[4:]
    return [scale * q + least for q in [*(b & 15 for b in packed), *(b >> 4 for b in packed)]]


def q4_k(block: bytes) -> list[float]:
    """256 values: 8 runs of 32, each with a 6-bit scale and a 6-bit minimum, packed into 12 bytes."""
    scale, least, packed, nibbles = half(block), half(block[2:]), block[4:16], block[16:]
    values = []
    for run in range(8):
        if run < 4:
            s, m = packed[run] & 63, packed[run + 4] & 63
        else:
            s = packed[run + 4] & 15 | packed[run - 4] >> 6 << 4
            m = packed[run + 4] >> 4 | packed[run] >> 6 << 4
        part = nibbles[run // 2 * 32 :][:32]
        values += [scale * s * (b >> 4 if run % 2 else b & 15) - least * m for b in part]
    return values


def q6_k(block: bytes) -> list[float]:
    """256 values: 4 low bits, 2 high bits, a signed 8-bit scale for each 16."""
    low, high, scales, scale = block[:128], block[128:192], block[192:208], half(block[208:])
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        quarter, l = divmod(within, 32)  # noqa: E741
        byte = low[part * 64 + quarter % 2 * 32 + l]
        bits = byte >> 4 if quarter >= 2 else byte & 15
        q = bits | (high[part * 32 + l] >> 2 * quarter & 3) << 4
        values.append(scale * signed(scales[i // 16]) * (q - 32))
    return values


# type: (values a block, bytes a block, where its float16 scales are, its definition)
BLOCKS = {
    Q.Q8_0: (32, 34, [0], q8_0),
    Q.Q4_0: (32, 18, [0], q4_0),
    Q.Q4_1: (32, 20, [0, 2], q4_1),
    Q.Q4_K: (256, 144, [0, 2], q4_k),
    Q.Q6_K: (256, 210, [208], q6_k),
}


def test_config_and_tensors_are_hugging_faces(write_gguf, weights):
    file = GgufFile(write_gguf())
    config = file.config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (
        32,
        64,
        96,
        2,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.rope_theta) == (512, 1e-5, 10000.0)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, True, False)
    assert config.rope_scaling == RopeScaling()
    assert set(file.tensors) == set(weights)
    for name, array in weights.items():  # query and key rows and biases back in order, for both head counts
        assert file.tensors.shape(name) == array.shape
        np.testing.assert_array_equal(file.tensors[name], array, err_msg=name)


def test_no_output_tensor_means_a_tied_head(write_gguf):
    file = GgufFile(write_gguf(raw={"output.weight": None}))
    assert file.config.tie_word_embeddings
    assert "lm_head.weight" not in file.tensors


@pytest.mark.parametrize(("kind", "dtype"), [(Q.F16, "float16"), (Q.BF16, "bfloat16"), (Q.F32, "float32")])
def test_floats(write_gguf, weights, kind, dtype):
    array = weights["model.embed_tokens.weight"]
    file = GgufFile(write_gguf(raw={"token_embd.weight": (quantize(array, kind), kind)}))
    assert file.config.dtype == dtype
    tolerance = {Q.F16: 1e-3, Q.BF16: 8e-3, Q.F32: 0}[kind]
    loaded = file.tensors["model.embed_tokens.weight"]
    assert loaded.dtype == np.float32
    np.testing.assert_allclose(loaded, array, rtol=tolerance)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_mean_what_their_format_says(write_gguf, kind):
    values, size, scales, definition = BLOCKS[kind]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (6, size), dtype=np.uint8)
    for offset in scales:
        blocks[:, offset : offset + 2] = rng.normal(0, 0.1, (6, 1)).astype(np.float16).view(np.uint8)
    rows = blocks.reshape(3, 2 * size)  # three rows of two blocks
    file = GgufFile(write_gguf(raw={"output.weight": (rows, kind)}))
    expected = np.array([definition(bytes(block)) for block in blocks]).reshape(3, 2 * values)
    assert file.tensors.shape("lm_head.weight") == expected.shape
    np.testing.assert_allclose(file.tensors["lm_head.weight"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1], ids=lambda kind: kind.name)
def test_quantised_query_rows_are_put_back_in_order(write_gguf, weights, kind):
    name = "model.layers.1.self_attn.q_proj.weight"
    order = np.array([16 * h + i for h in range(4) for pair in range(8) for i in (pair, pair + 8)])
    raw = (quantize(weights[name][order], kind), kind)
    file = GgufFile(write_gguf(raw={"blk.1.attn_q.weight": raw}))
    steps = {Q.Q8_0: 0.02, Q.Q4_0: 0.3, Q.Q4_1: 0.3}
    np.testing.assert_allclose(file.tensors[name], weights[name], atol=steps[kind])


def test_other_quantisations_are_refused_by_name(write_gguf):
    raw = np.zeros((32, 84), np.uint8)
    with pytest.raises(ValueError, match=r"'token_embd\.weight' in .* has type Q2_K"):
        GgufFile(write_gguf(raw={"token_embd.weight": (raw, Q.Q2_K)})).tensors  # noqa: B018


def test_an_unknown_tensor_is_refused_by_name(write_gguf):
    extra = (np.ones(16, np.float32), Q.F32)
    with pytest.raises(ValueError, match=r"'blk\.0\.attn_q_norm\.weight'"):
        GgufFile(write_gguf(raw={"blk.0.attn_q_norm.weight": extra})).tensors  # noqa: B018


def test_head_dim_comes_from_the_first_key_that_tells(write_gguf):
    keys = {"llama.attention.key_length": 24, "llama.rope.dimension_count": 24}
    assert GgufFile(write_gguf(metadata=keys)).config.head_dim == 24
    keys = {"llama.rope.dimension_count": None}
    assert GgufFile(write_gguf(metadata=keys)).config.head_dim == 16


def test_linear_scaling(write_gguf):
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert GgufFile(write_gguf(metadata=keys)).config.rope_scaling == RopeScaling("linear", 4.0)


def test_yarn_scaling(write_gguf):
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    scaling = GgufFile(write_gguf(metadata=keys)).config.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4.0, 128)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, True)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def llama3_factors(factor, original, theta=500000.0, head_dim=16, low=1.0, high=4.0):
    """What llama.cpp's converter writes for Llama 3.1, one frequency after the other."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return (np.array(factors, np.float32), Q.F32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_in_the_stored_factors(write_gguf, factor):
    raw = {"rope_freqs.weight": llama3_factors(factor, 8192)}
    file = GgufFile(write_gguf(raw=raw, metadata={"llama.rope.freq_base": 500000.0}))
    expected = RopeScaling("llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert file.config.rope_scaling == expected
    assert not any("rope" in name for name in file.tensors)


def test_other_stored_factors_are_refused(write_gguf):
    raw = {"rope_freqs.weight": llama3_factors(8.0, 8192, low=2.0)}
    file = GgufFile(write_gguf(raw=raw, metadata={"llama.rope.freq_base": 500000.0}))
    with pytest.raises(ValueError, match=r"'rope_freqs\.weight' that are not Llama 3's"):
        file.config  # noqa: B018


def test_stored_factors_of_one_scale_nothing(write_gguf):
    file = GgufFile(write_gguf(raw={"rope_freqs.weight": (np.ones(8, np.float32), Q.F32)}))
    assert file.config.rope_scaling == RopeScaling()


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_count"),
        ({"llama.embedding_length": None}, r"no metadata key 'llama\.embedding_length'"),
        ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "rotates 8 of 16"),
        ({"llama.attention.value_length": 8}, "values of another length"),
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv in each layer"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
    ],
)
def test_metadata_that_the_decoder_cannot_represent(write_gguf, metadata, words):
    with pytest.raises(ValueError, match=words):
        GgufFile(write_gguf(metadata=metadata)).config  # noqa: B018


def test_other_architectures_and_split_files_are_refused(write_gguf):
    with pytest.raises(ValueError, match="architecture 'qwen2'"):
        GgufFile(write_gguf(metadata={"general.architecture": "qwen2"}))
    with pytest.raises(ValueError, match="one part of a split model"):
        GgufFile(write_gguf(metadata={"split.count": 3}))


def test_not_a_gguf_file(tmp_path, write_gguf):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        GgufFile(tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    for content in (
        b"",
        b"not a model at all",
        write_gguf().read_bytes()[:-4000],
        write_gguf().read_bytes()[:300],
    ):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match="not a complete GGUF file"):
            GgufFile(broken)


def test_smollm2(smollm2_path):
    file = GgufFile(smollm2_path)
    config = file.config
    assert config.tie_word_embeddings
    assert len(file.tensors) == 2 + 30 * 9
    assert file.tensors.shape("model.embed_tokens.weight") == (49152, 576)
    assert file.tensors.shape("model.layers.29.self_attn.k_proj.weight") == (192, 576)
    assert file.tensors["model.layers.29.mlp.down_proj.weight"].shape == (576, 1536)
