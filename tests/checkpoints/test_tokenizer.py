import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from paged_jax.checkpoints.gguf import GgufFile
from paged_jax.checkpoints.tokenizer import Tokenizer

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="../shared/reference is not here")
WORDS = ["<unk>", "<s>", "</s>", "hello", "world", "[user]"]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def directory(tmp_path):
    """A Hugging Face directory whose tokenizer knows six words; tests add the files that they are about."""
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(WORDS[:3])
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory, name, **values):
    (directory / name).write_text(json.dumps(values))


def test_truncation_and_padding_of_the_file_are_off(directory):
    assert Tokenizer.from_directory(directory).encode("hello " * 6) == [3] * 6
    assert Tokenizer.from_directory(directory).encode("hello") == [3]


def test_bos_and_eos_rules_of_the_config_override_the_file(directory):
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    write(directory, "tokenizer_config.json", **names)
    assert Tokenizer.from_directory(directory).encode("hello") == [3]
    write(directory, "tokenizer_config.json", **names, add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("hello") == [1, 3, 2]
    assert tokenizer.encode("hello", add_special_tokens=False) == [3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 6)
    assert tokenizer.decode([1, 3, 4, 2]) == "hello world"
    assert tokenizer.decode([1, 3], skip_special_tokens=False) == "<s> hello"


def test_a_named_token_outside_the_vocabulary(directory):
    write(directory, "tokenizer_config.json", bos_token="<begin>", add_bos_token=True)
    with pytest.raises(ValueError, match="'<begin>' that its vocabulary does not hold"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [5, 4]}, {"eos_token_id": 3}, (5, 4, 2)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({}, {"eos_token_id": [4]}, (4, 2)),
        ({}, {}, (2,)),
    ],
)
def test_end_of_text_ids(directory, generation, model, expected):
    write(directory, "generation_config.json", **generation)
    write(directory, "config.json", **model)
    write(directory, "tokenizer_config.json", eos_token="</s>")
    assert Tokenizer.from_directory(directory).eos_token_ids == expected


def test_special_tokens_map(directory):
    write(directory, "special_tokens_map.json", bos_token={"content": "<s>"})
    assert Tokenizer.from_directory(directory).bos_token_id == 1


def test_chat_template_of_the_config(directory):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    write(directory, "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template(HELLO) == "[user] hello"
    assert tokenizer.encode_chat(HELLO) == [5, 3]


def test_chat_template_by_name_and_in_a_file_of_its_own(directory):
    several = [{"name": "tools", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(directory, "tokenizer_config.json", chat_template=several)
    assert Tokenizer.from_directory(directory).apply_chat_template(HELLO) == "plain"
    (directory / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(directory).apply_chat_template(HELLO) == "file"


def test_no_chat_template(directory):
    tokenizer = Tokenizer.from_directory(directory)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.apply_chat_template(HELLO)


@pytest.mark.parametrize("written", ["", "{{ bos_token }} "])
@pytest.mark.parametrize("add_bos", [True, False])
def test_exactly_one_bos_in_a_chat(directory, written, add_bos):
    template = written + "{{ messages[0].content }}"
    write(
        directory,
        "tokenizer_config.json",
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=add_bos,
        add_eos_token=True,
        chat_template=template,
    )
    expected = [1, 3] if add_bos or written else [3]
    assert Tokenizer.from_directory(directory).encode_chat(HELLO) == expected


def test_missing_and_broken_files(directory):
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.model").touch()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model alone must be converted"):
        Tokenizer.from_directory(directory)


def byte_level(pre, **keys):
    """GGUF metadata of a byte-level BPE with the 256 bytes, two merges and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|begin|>", "<|end|>", *alphabet, "12", "123", "ab"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["1 2", "12 3", "a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **keys,
    }


def pieces(tokenizer, text):
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["ab", "1", "2", "3", "1"]),  # digit by digit
        ("gpt-2", ["ab", "123", "1"]),
        ("llama-bpe", ["ab", "123", "1"]),  # three digits at a time
        ("default", ["ab", "123", "1"]),
    ],
)
def test_splitting(pre, expected):
    assert pieces(Tokenizer.from_gguf(byte_level(pre)), "ab1231") == expected


def test_llama3_splits_digits_in_threes():
    assert pieces(Tokenizer.from_gguf(byte_level("llama-bpe")), "0123") == ["0", "12", "3"]
    assert pieces(Tokenizer.from_gguf(byte_level("gpt-2")), "0123") == ["0", "123"]


@pytest.mark.parametrize("text", ["héllo 🚀\n\n  wörld\t12", "", " ", "ab<|end|>ab", "don't  stop"])
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "default"])
def test_byte_level_text_comes_back(pre, text):
    tokenizer = Tokenizer.from_gguf(byte_level(pre))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_control_tokens_are_special():
    tokenizer = Tokenizer.from_gguf(byte_level("gpt-2"))
    assert tokenizer.encode("<|end|>") == [1]
    assert tokenizer.decode([1]) == ""


def test_who_begins_with_bos():
    assert Tokenizer.from_gguf(byte_level("gpt-2")).encode("") == []
    assert Tokenizer.from_gguf(byte_level("llama-bpe")).encode("") == [0]
    assert Tokenizer.from_gguf(byte_level("llama-bpe", **{"tokenizer.ggml.add_bos_token": False})).encode("") == []
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_gguf(byte_level("gpt-2", **both)).encode("") == [0, 1]


def test_every_end_of_turn_of_a_gguf_file_counts():
    keys = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 1}
    assert Tokenizer.from_gguf(byte_level("gpt-2", **keys)).eos_token_ids == (1, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5'"),
        ({"tokenizer.ggml.model": None}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "no score for each token"),
    ],
)
def test_unknown_kinds_are_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_gguf(byte_level("gpt-2", **change))


def sentencepiece(pieces_by_score, **keys):
    """GGUF metadata of a SentencePiece BPE: controls, bytes, pieces from best to worst, letters."""
    letters = sorted(set("".join(pieces_by_score)))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces_by_score, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **keys,
    }


def test_sentencepiece_merges_the_best_piece_first():
    # "▁abc": with "bc" before "ab" the pair (b, c) is taken first, although (a, b) comes first in the text
    assert pieces(Tokenizer.from_gguf(sentencepiece(["bc", "ab", "▁a"])), "abc") == ["▁a", "bc"]
    assert pieces(Tokenizer.from_gguf(sentencepiece(["ab", "bc", "▁a"])), "abc") == ["▁", "ab", "c"]


def test_sentencepiece_spaces_and_bytes():
    tokenizer = Tokenizer.from_gguf(sentencepiece(["▁a", "▁▁"]))
    assert tokenizer.encode("")[:1] == [1]
    assert pieces(tokenizer, "a a") == ["▁a", "▁a"]
    assert pieces(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("a  a", " a", "é🚀a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    bare = Tokenizer.from_gguf(sentencepiece(["▁a"], **{"tokenizer.ggml.add_space_prefix": False}))
    assert pieces(bare, "a a") == ["a", "▁a"]
    assert bare.decode(bare.encode(" a")) == " a"


def test_sentencepiece_with_equal_scores_is_refused():
    metadata = sentencepiece(["ab", "bc"])
    metadata["tokenizer.ggml.scores"][259:261] = [-1.0, -1.0]
    with pytest.raises(ValueError, match="several pieces one score"):
        Tokenizer.from_gguf(metadata)


@needs_reference
def test_stories260k_golden_text():
    folder = REFERENCE / "stories260K"
    golden = json.loads((folder / "reference.json").read_text())
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.encode(golden["text"]) == golden["greedy_ids"]
    assert tokenizer.decode(golden["greedy_ids"]) == golden["text"]
    assert tokenizer.eos_token_ids == (2,)


@needs_reference
def test_sentencepiece_scores_give_the_merges_of_a_real_model():
    data = json.loads((REFERENCE / "stories260K" / "tokenizer.json").read_text())["model"]
    tokens = sorted(data["vocab"], key=data["vocab"].get)
    metadata = sentencepiece([]) | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
    }
    built = json.loads(Tokenizer.from_gguf(metadata).backend.to_str())["model"]
    assert [tuple(m) for m in built["merges"]] == [
        tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in data["merges"]
    ]


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Tokenizer.from_gguf(GgufFile(smollm2_path).metadata)


@needs_reference
def test_smollm2_vectors(smollm2):
    vectors = json.loads((REFERENCE / "smollm2" / "tokenizer_vectors.json").read_text())
    wrong = [v["text"] for v in vectors if smollm2.encode(v["text"]) != v["ids"]]
    assert not wrong


@needs_reference
def test_smollm2_prompts(smollm2):
    for item in json.loads((REFERENCE / "smollm2" / "reference.json").read_text())["items"]:
        if item["kind"] == "chat":
            ids = smollm2.encode_chat([{"role": "user", "content": item["prompt"]}])
        else:
            ids = smollm2.encode(item["prompt"])
        assert ids == item["prompt_ids"]
        assert smollm2.decode(item["greedy_ids"][: item["first_eos_index"]]) == item["text"]


def test_smollm2_special_tokens(smollm2):
    assert (smollm2.eos_token_ids, smollm2.vocab_size, smollm2.has_chat_template) == ((2,), 49152, True)
    assert smollm2.encode("<|im_start|>user") == [1, *smollm2.encode("user")]
