"""The text of one request as it grows: token ids in, characters out, and an end at the first stop string."""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_BYTES_OF_INCOMPLETE_CHARACTER = 3
CONTEXT = 8
"""Tokens kept as context for the next: what a decoder does to a token depends on its neighbours only."""
MAX_WINDOW = 16
"""Tokens decoded at most, where the window can be cut without changing what is decoded."""
LONGEST_WINDOW = 64
"""Tokens decoded at most in any case."""


class TextStream:
    """Incremental detokenization and stop strings for one request, on the host.

    The text is `decode(prompt + output)` less `decode(prompt)`. It only ever grows, so what later tokens
    could change is held back: the bytes of an incomplete character, and the longest end of the text that may
    become a stop string. Stop strings count as though the text came one character at a time: the first to be
    complete ends it (of two with the same end, the longer), wherever token boundaries lie. The prompt's text
    never counts. The cost of a token does not depend on the length of the text or the prompt.
    """

    def __init__(
        self,
        backend: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop_strings: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Text of the first `min_tokens` tokens never counts towards a stop string."""
        self._num_unmatched = min_tokens
        self._detokenizer = _Detokenizer(backend, prompt_token_ids, skip_special_tokens)
        # longest first: the first to match is then the longest of those that end at the same character
        self._matchers = [_Matcher(s) for s in sorted(stop_strings, key=len, reverse=True)]
        self._include_stop = include_stop_str_in_output
        self._shown: list[str] = []
        self._held = ""
        self._ended = False

    @property
    def text(self) -> str:
        """Everything that may be shown so far."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def append(self, token_id: int) -> str | None:
        """Add one token; returns the stop string that it has completed, or None.

        Raises ValueError after a match or after `finish`.
        """
        if self._ended:
            raise ValueError(f"token {token_id} comes after the end of the text: start another TextStream")
        text = self._detokenizer.append(token_id)
        if self._num_unmatched:
            self._num_unmatched -= 1
            self._shown.append(text)
            return None
        return self._extend(text)

    def finish(self) -> str | None:
        """No more tokens will come: show what was held back, an incomplete character as U+FFFD.

        Returns the stop string if one is completed by that, else None. Does nothing after the end.
        """
        if self._ended:
            return None
        stop = self._extend(self._detokenizer.finish())
        if stop is None:
            self._shown.append(self._held)
            self._held = ""
            self._ended = True
        return stop

    def _extend(self, new: str) -> str | None:
        fresh = self._held + new
        for end, character in enumerate(new, start=len(self._held) + 1):
            # every matcher sees every character up to the match
            complete = [m.stop for m in self._matchers if m.advance(character)]
            if complete:
                stop = complete[0]
                self._shown.append(fresh[: end if self._include_stop else end - len(stop)])
                self._held = ""
                self._ended = True
                return stop
        held = max((m.matched for m in self._matchers), default=0)
        self._shown.append(fresh[: len(fresh) - held])
        self._held = fresh[len(fresh) - held :]
        return None


class _Matcher:
    """Knuth, Morris and Pratt: how much of one stop string the text ends with, a character at a time."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest end of the text that is a beginning of the stop string."""
        self._fallback = [0]
        """For each matched length less one, the next shorter beginning that the text ends with as well."""
        for character in stop[1:]:
            self._fallback.append(self._next(self._fallback[-1], character))

    def advance(self, character: str) -> bool:
        """Whether the stop string is complete with this character."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.stop)

    def _next(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.stop[matched] == character)


class _Detokenizer:
    """Turns tokens into text that later tokens cannot change, by decoding a short window of the newest ones.

    (`tokenizers.decoders.DecodeStream` holds everything back while bytes stay invalid, at a cost that grows
    with the square of their number, and cannot be flushed at the end.)
    """

    def __init__(self, backend: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._backend = backend
        special = backend.get_added_tokens_decoder().items() if skip_special_tokens else ()
        self._skipped = frozenset(token_id for token_id, token in special if token.special)
        self._window = self._end_of_prompt(prompt_token_ids)
        """The newest tokens that have text."""
        self._known = self._decode(self._window)
        """The part of the window's text that is the prompt's or has been given out."""
        self._num_pending = 0
        """Tokens at the window's end since the last that gave text out."""

    def append(self, token_id: int) -> str:
        """The text that is certain with one more token."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        self._num_pending += 1
        text = self._decode(self._window)
        unfinished = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_BYTES_OF_INCOMPLETE_CHARACTER)
        if not text.startswith(self._known):
            if unfinished and self._num_pending <= MAX_BYTES_OF_INCOMPLETE_CHARACTER:
                return ""  # in a run of byte tokens the decoder spoils the characters before an incomplete one
            text = self._reconcile(text)
        new = text[len(self._known) : max(len(self._known), len(text) - unfinished)]
        if new:
            self._known += new
            self._num_pending = 0
        if len(self._window) > MAX_WINDOW:
            new += self._shorten(text)
        return new

    def finish(self) -> str:
        """What was still uncertain, as it stands."""
        text = self._decode(self._window)
        if not text.startswith(self._known):
            text = self._reconcile(text)
        return text[len(self._known) :]

    def _reconcile(self, text: str) -> str:
        """Make what is known a beginning of the window's text again; returns that text."""
        stem = self._known.rstrip(REPLACEMENT)
        if text.startswith(stem) and stem != self._known:
            self._known = stem  # a character that the prompt began is complete: it is shown
            return text
        # invalid bytes have spoilt characters that were given out: begin anew without them
        self._window = self._window[-self._num_pending :]
        self._known = ""
        return self._decode(self._window)

    def _shorten(self, text: str) -> str:
        """Forget the window's older tokens if its text does not depend on them; returns text given up on."""
        unknown = len(text) - len(self._known)
        for tail in _tails(self._window):
            tail_text = self._decode(tail)
            if text.endswith(tail_text) and len(tail_text) > unknown:
                self._window = tail
                self._known = tail_text[: len(tail_text) - unknown]
                return ""
        if len(self._window) <= LONGEST_WINDOW:
            return ""
        self._window = self._window[-CONTEXT:]
        self._known = self._decode(self._window)
        return text[len(text) - unknown :]

    def _end_of_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, enough to decode the first output token after."""
        newest = [t for t, _ in zip(self._with_text(reversed(prompt_token_ids)), range(MAX_WINDOW), strict=False)]
        tails = list(_tails(newest[::-1]))
        clean = (tail for tail in tails if REPLACEMENT not in self._decode(tail))
        return next(clean, tails[0])

    def _with_text(self, token_ids: Iterator[int]) -> Iterator[int]:
        return (token_id for token_id in token_ids if self._has_text(token_id))

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._backend.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


def _tails(token_ids: list[int]) -> Iterator[list[int]]:
    """The last CONTEXT tokens, then some more, so that one of the tails begins with a whole character."""
    for length in range(CONTEXT, CONTEXT + MAX_BYTES_OF_INCOMPLETE_CHARACTER + 1):
        yield token_ids[-length:]
