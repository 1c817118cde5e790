"""The `tokenizers` object that a GGUF file's `tokenizer.ggml.*` metadata describes."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

# llama.cpp's token types
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# What llama.cpp does with a file whose converter did not recognise the model's own splitting.
_DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]")
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_SPACE = "▁"  # SentencePiece writes spaces as this


def build_backend(metadata: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer without BOS or EOS rules from `tokenizer.ggml.*`; control tokens become special.

    Raises ValueError, naming it, for a kind of tokenizer (`model`) or of splitting (`pre`) that is not known.
    """
    model, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not model or not tokens:
        raise ValueError("the GGUF file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    if model == "gpt2":
        backend = _byte_level(metadata, tokens)
    elif model == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise ValueError(f"the GGUF file's tokenizer model {model!r} is not supported; known: gpt2, llama")
    types = metadata.get("tokenizer.ggml.token_type") or []
    special = {token for token, kind in zip(tokens, types, strict=False) if kind in (_UNKNOWN, _CONTROL)}
    added = [
        AddedToken(token, special=token in special, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if token in special or kind == _USER_DEFINED
    ]
    backend.add_tokens(added)
    return backend


def default_add_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether llama.cpp puts BOS first when the file does not say."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    return sentencepiece or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a word that is itself a token without looking at the merges
    backend = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _LLAMA3_NAMES))
    backend.pre_tokenizer = _splitting(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitting(pre: str) -> PreTokenizer:
    if pre == "smollm":
        return pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if pre in ("gpt-2", "gpt2"):
        return ByteLevel(add_prefix_space=False)
    if pre == "default":
        splits = _DEFAULT_SPLITS
    elif pre in _LLAMA3_NAMES:
        splits = (_LLAMA3_SPLIT,)
    else:
        known = ", ".join(("smollm", "gpt-2", "default", *_LLAMA3_NAMES))
        raise ValueError(f"the GGUF file's pre-tokenizer {pre!r} is not supported; known: {known}")
    parts = [Split(Regex(pattern), behavior="isolated") for pattern in splits]
    return pre_tokenizers.Sequence([*parts, ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ValueError("the GGUF file's SentencePiece tokenizer has no score for each token, so no order of merges")
    prefix_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = BPE(
        {token: index for index, token in enumerate(tokens)},
        _merges_by_score(tokens, scores, metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix_space else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    return backend


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to put a normal piece together from two others, best piece first.

    SentencePiece's BPE always performs the merge whose result scores highest, so a list of merges in that
    order does the same. That holds while no two pieces share a score; where they do, as in a unigram model's
    vocabulary written as BPE, SentencePiece goes by place in the text, which such a list cannot say.
    """
    # control and byte tokens are never spelled out by merges
    index = {token: number for number, token in enumerate(tokens) if types[number] == _NORMAL}
    merges: list[tuple[float, int, int]] = []
    scored: list[float] = []
    for token, number in index.items():
        score = scores[number]
        pairs = [(index.get(token[:cut]), index.get(token[cut:])) for cut in range(1, len(token))]
        found = sorted((left, right) for left, right in pairs if left is not None and right is not None)
        merges += [(-score, left, right) for left, right in found]
        scored += [score] * bool(found)
    if any(first == second for first, second in pairwise(sorted(scored))):
        raise ValueError(
            "the GGUF file's SentencePiece tokenizer gives several pieces one score, which its BPE form "
            "cannot reproduce: use the model's Hugging Face directory instead"
        )
    return [(tokens[left], tokens[right]) for _, left, right in sorted(merges)]
