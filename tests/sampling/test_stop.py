"""Incremental text and stop strings (G23), against decoding all at once and matching by the character."""

import itertools
import json
import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paged_jax.sampling.stop import TextStream, _Detokenizer

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
REPLACEMENT = "\ufffd"


def spelling_tokenizer(alphabet: str) -> Tokenizer:
    """Every string of 1 to 3 of the letters is a token."""
    words = ["".join(w) for n in (1, 2, 3) for w in itertools.product(alphabet, repeat=n)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte, as GPT-2 spells bytes; two special tokens and an ordinary added one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models are converted: words with a leading mark, bytes, a leading space stripped."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁Hello",
        "▁world",
        "lo",
        ",",
        "é",
    ]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


SPELLING = spelling_tokenizer("ABCDEFGHIJK")
AB = spelling_tokenizer("AB")
BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()


def splits(text: str):
    """All ways to cut a text into pieces of 1 to 3 characters."""
    if not text:
        yield []
    for n in range(1, min(3, len(text)) + 1):
        for rest in splits(text[n:]):
            yield [text[:n], *rest]


def run(tokenizer, prompt, tokens, stop=(), include=False, skip_special_tokens=True):
    """(text, stop string, what a client has been sent after each token); checks that the text only grows."""
    stream = TextStream(tokenizer, prompt, stop, include, skip_special_tokens)
    seen, matched = [stream.text], None
    for token in tokens:
        matched = stream.append(token)
        seen.append(stream.text)
        if matched is not None:
            break
    matched = matched or stream.finish()
    seen.append(stream.text)
    for earlier, later in itertools.pairwise(seen):
        assert later.startswith(earlier)
    return stream.text, matched, seen


def by_character(text: str, stops, include: bool):
    """The oracle: (text, stop string) when the text comes one character at a time."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def held_back(text: str, stops) -> int:
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def ids(tokenizer, pieces):
    return [tokenizer.token_to_id(p) for p in pieces]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stops", "shown", "stop"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["DEFX"], "ABCDEFGHIJK", None),
        (["CD"], "AB", "CD"),
        (["DE", "DEF"], "ABC", "DE"),
        (["EFG", "G", "DEFG"], "ABC", "DEFG"),
        (["FGHIJK", "IJ"], "ABCDEFGH", "IJ"),
        (["A"], "", "A"),
        (["K"], "ABCDEFGHIJ", "K"),
    ],
)
def test_g23_every_split_of_the_text_stops_at_the_same_character(stops, shown, stop, include):
    expected = shown + (stop or "") if include else shown
    for pieces in splits("ABCDEFGHIJK"):
        text, matched, seen = run(SPELLING, [], ids(SPELLING, pieces), stops, include)
        assert (text, matched) == (expected, stop)
        assert all(expected.startswith(s) for s in seen)


def test_g23_a_stop_in_the_prompt_or_across_its_end_does_not_count():
    text, matched, _ = run(SPELLING, ids(SPELLING, ["ABC", "D"]), ids(SPELLING, ["EF", "AB", "CD", "E"]), ["CDE", "BC"])
    assert (text, matched) == ("EFA", "BC")
    text, matched, _ = run(SPELLING, ids(SPELLING, ["ABC", "D"]), ids(SPELLING, ["E", "F"]), ["CDE", "D"])
    assert (text, matched) == ("EF", None)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("AB", min_size=1, max_size=3), max_size=12),
    stops=st.lists(st.text("AB", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
def test_g23_equals_matching_by_the_character_and_holds_back_no_more_than_it_must(pieces, stops, include):
    text, matched, seen = run(AB, [], ids(AB, pieces), stops, include)
    assert (text, matched) == by_character("".join(pieces), stops, include)
    for number, shown in enumerate(seen[1:-1], start=1):
        so_far = "".join(pieces[:number])
        expected, stop = by_character(so_far, stops, include)
        assert shown == (expected if stop else so_far[: len(so_far) - held_back(so_far, stops)])


def test_the_end_is_final():
    stream = TextStream(SPELLING, [], ["B"])
    assert stream.append(SPELLING.token_to_id("ABC")) == "B"
    assert stream.finish() is None
    assert stream.text == "A"
    with pytest.raises(ValueError, match="after the end"):
        stream.append(0)
    stream = TextStream(SPELLING, [])
    stream.finish()
    with pytest.raises(ValueError, match="after the end"):
        stream.append(0)


def utf8(tokenizer, text: str) -> list[int]:
    if tokenizer is BYTE_LEVEL:
        return tokenizer.encode(text, add_special_tokens=False).ids
    return [tokenizer.token_to_id(f"<0x{b:02X}>") for b in text.encode()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", ["é☃😀", "x😀" * 12, "日本語のテキスト、とても長いです。" * 4, "👩‍👩‍👧‍👦🏳️‍🌈"])
def test_characters_spread_over_tokens_appear_whole_and_at_once(tokenizer, text):
    tokens = utf8(tokenizer, text)
    for cut in range(len(text)):
        prompt = utf8(tokenizer, text[:cut])
        stream = TextStream(tokenizer, prompt, (), False, True)
        for number, token in enumerate(tokens[len(prompt) :], start=len(prompt) + 1):
            stream.append(token)
            assert stream.text == text.encode()[:number].decode(errors="ignore")[cut:]


@pytest.mark.parametrize(
    ("tokenizer", "marks"), [(BYTE_LEVEL, 1), (BYTE_FALLBACK, 3)], ids=["byte_level", "byte_fallback"]
)
def test_an_incomplete_character_is_shown_as_u_fffd_at_the_end_only(tokenizer, marks):
    text, _, seen = run(tokenizer, [], utf8(tokenizer, "a😀")[:-1])
    assert seen[-2] == "a"
    assert text == "a" + REPLACEMENT * marks


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_a_run_that_never_completes_a_character_is_neither_held_back_nor_slow(tokenizer):
    token = utf8(tokenizer, "é")[1]
    stream = TextStream(tokenizer, [], ())
    for number in range(2000):
        stream.append(token)
        assert len(stream._detokenizer._window) <= 64
        assert number - 3 <= len(stream.text) <= number + 1
    stream.finish()
    assert stream.text == REPLACEMENT * 2000


def test_a_character_begun_by_the_prompt_is_shown_when_complete():
    tokens = utf8(BYTE_LEVEL, "hi 😀!")
    assert run(BYTE_LEVEL, tokens[:5], tokens[5:])[0] == "😀!"


def test_a_prompt_that_ends_in_u_fffd_keeps_it():
    assert run(BYTE_LEVEL, utf8(BYTE_LEVEL, "hi \ufffd"), utf8(BYTE_LEVEL, " you"))[0] == " you"


def test_special_tokens_are_left_out_or_kept():
    begin, end, tool = ids(BYTE_LEVEL, ["<|begin|>", "<|end|>", "<tool>"])
    tokens = [
        begin,
        *utf8(BYTE_LEVEL, "a"),
        tool,
        end,
        *utf8(BYTE_LEVEL, "é")[:1],
        end,
        *utf8(BYTE_LEVEL, "é")[1:],
    ]
    assert run(BYTE_LEVEL, [begin], tokens)[0] == "a<tool>é"
    shown = run(BYTE_LEVEL, [begin], tokens[:4], skip_special_tokens=False)[0]
    assert shown == "<|begin|>a<tool><|end|>"
    assert run(BYTE_LEVEL, [], [*utf8(BYTE_LEVEL, "a"), end], ["<|end|>"])[1] is None


def test_the_leading_space_depends_on_the_prompt():
    hello, world, bos = ids(BYTE_FALLBACK, ["▁Hello", "▁world", "<s>"])
    assert run(BYTE_FALLBACK, [bos], [hello, world])[0] == "Hello world"
    assert run(BYTE_FALLBACK, [bos, hello], [world, world])[0] == " world world"
    assert run(BYTE_FALLBACK, [bos, hello, *[bos] * 50], [world])[0] == " world"


def test_ids_without_a_token_have_no_text():
    assert run(BYTE_LEVEL, [10**6], [10**6, *utf8(BYTE_LEVEL, "é"), 10**6])[0] == "é"


def only_grows(tokenizer, tokens) -> bool:
    """Whether each beginning's text, unfinished characters aside, is a beginning of the whole text."""
    texts = [tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1)]
    return all(
        later.startswith(earlier if not earlier.endswith(REPLACEMENT) else earlier.rstrip(REPLACEMENT))
        for earlier, later in itertools.combinations(texts, 2)
    )


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60),
    data=st.data(),
)
def test_any_bytes_equal_decoding_everything_at_once(tokens, data):
    cut = data.draw(st.integers(0, len(tokens)))
    prompt_text = BYTE_LEVEL.decode(tokens[:cut])
    whole = BYTE_LEVEL.decode(tokens)
    text, _, _ = run(BYTE_LEVEL, tokens[:cut], tokens[cut:])
    if whole.startswith(prompt_text):
        assert text == whole[len(prompt_text) :]


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["▁Hello", "▁world", "lo", ",", "▁", "<s>", "é", "bytes of é", "bytes of 😀", "<0x80>"]),
        max_size=25,
    ),
    data=st.data(),
)
def test_pieces_and_byte_runs_equal_decoding_everything_at_once(pieces, data):
    tokens = []
    for piece in pieces:
        name = piece.removeprefix("bytes of ")
        tokens += utf8(BYTE_FALLBACK, name) if name != piece else [BYTE_FALLBACK.token_to_id(piece)]
    cut = data.draw(st.integers(0, len(tokens)))
    text, _, _ = run(BYTE_FALLBACK, tokens[:cut], tokens[cut:])
    whole, prompt_text = BYTE_FALLBACK.decode(tokens), BYTE_FALLBACK.decode(tokens[:cut])
    # the decoder spoils good characters beside bad bytes after the fact: there is no growing text for that
    if whole.startswith(prompt_text) and only_grows(BYTE_FALLBACK, tokens) and REPLACEMENT not in prompt_text:
        assert text == whole[len(prompt_text) :]


def test_the_cost_of_a_token_does_not_grow_with_the_text_or_the_prompt(monkeypatch):
    lengths = []  # counts, unlike times, are the same on a busy machine
    decode = _Detokenizer._decode
    monkeypatch.setattr(_Detokenizer, "_decode", lambda self, ids: lengths.append(len(ids)) or decode(self, ids))
    letter = utf8(BYTE_LEVEL, "a")
    stream = TextStream(BYTE_LEVEL, letter * 10**5, ["Q" * 50, "zz"])
    assert sum(lengths) < 100
    for token in letter * 1000:
        stream.append(token)
    assert sum(lengths) < 1000 * 20


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared (reference models) is absent")
def test_a_real_models_tokens_stream_to_its_text():
    folder = SHARED / "reference" / "stories260K"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("Once upon a time é ☃ 😀 x", "  two  spaces\n\n\tand 日本語", string.printable):
        tokens = tokenizer.encode(text).ids
        for cut in range(1, len(tokens)):
            prompt_text, whole = tokenizer.decode(tokens[:cut]), tokenizer.decode(tokens)
            if whole.startswith(prompt_text):
                assert run(tokenizer, tokens[:cut], tokens[cut:])[0] == whole[len(prompt_text) :]


def test_no_jax_is_imported_on_the_host_side():
    code = (
        "import json, sys, paged_jax.sampling.params, paged_jax.sampling.seeds, paged_jax.sampling.stop;"
        "print(json.dumps('jax' in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) is False
