"""The tokenizer and chat template that came with a model, whichever file they came in."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers.processors import TemplateProcessing

from paged_jax.checkpoints.chat_template import render_chat_template
from paged_jax.checkpoints.gguf_tokenizer import build_backend, default_add_bos
from paged_jax.checkpoints.safetensors import read_json

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back, and chats to prompts.

    `backend` does the encoding, BOS and EOS rules included. `special_tokens` are the named ones (`bos_token`,
    ...) that chat templates refer to. `chat_template` may be None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        # a tokenizer.json may carry the settings of its training; they would cut and pad prompts
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """From a Hugging Face directory with a `tokenizer.json`.

        The end-of-text ids are those of `generation_config.json` (else `config.json`) and the tokenizer's
        own. Raises FileNotFoundError when there is no `tokenizer.json`, ValueError when a file makes no
        sense.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            slow = (directory / "tokenizer.model").is_file()
            hint = " (a tokenizer.model alone must be converted with transformers first)" if slow else ""
            raise FileNotFoundError(f"{directory} has no tokenizer.json{hint}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more specific
            raise ValueError(f"{path} is not a tokenizer that this version of tokenizers reads: {error}") from None
        config = _optional_json(directory / "tokenizer_config.json")
        named = {**_optional_json(directory / "special_tokens_map.json"), **config}
        special = {name: _content(named[name]) for name in _SPECIAL_NAMES if named.get(name)}
        if "add_bos_token" in config or "add_eos_token" in config:
            # explicit settings override the file's own post-processor, as in transformers
            set_bos_eos(
                backend,
                special.get("bos_token") if config.get("add_bos_token") else None,
                special.get("eos_token") if config.get("add_eos_token") else None,
            )
        own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        return cls(
            backend,
            eos_token_ids=merge_ids(configured_eos(directory), own),
            special_tokens=special,
            chat_template=_directory_template(directory, config),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """From the metadata of a GGUF file. Raises ValueError for no tokenizer, or one that is not known."""
        backend = build_backend(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
        special = {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", default_add_bos(metadata))
        set_bos_eos(
            backend,
            special.get("bos_token") if add_bos else None,
            special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
        )
        ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        return cls(
            backend,
            eos_token_ids=merge_ids(*ends),
            special_tokens=special,
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning-of-text token, whether or not prompts begin with it."""
        token = self._special_tokens.get("bos_token")
        return None if token is None else self.backend.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` and `encode_chat` work."""
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised.

        With `add_special_tokens`, the model's own BOS and EOS rules apply.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that do not form a whole character become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt for `messages` (dicts with `role` and `content`), with the cue for the assistant's turn.

        The text contains whatever BOS the template writes, so it must be encoded with
        `add_special_tokens=False`; `encode_chat` does. Raises ValueError when the model has no template or
        the template refuses the messages.
        """
        if self._chat_template is None:
            raise ValueError("this model has no chat template: give it a plain prompt, or choose an instruct model")
        return render_chat_template(
            self._chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._special_tokens,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat, with exactly one BOS for a model whose prompts begin with BOS.

        Most templates write BOS themselves; where one does not, it is put first, as for any prompt.
        """
        ids = self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)
        bos = self.bos_token_id
        prompts_begin_with_bos = bos is not None and self.encode("")[:1] == [bos]
        return [bos, *ids] if prompts_begin_with_bos and ids[:1] != [bos] else ids


def set_bos_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put the token `bos` before and `eos` after each text; None for neither."""
    parts = [token for token in (bos, "$A", eos) if token is not None]
    special = []
    for token in {token for token in (bos, eos) if token is not None}:
        index = backend.token_to_id(token)
        if index is None:
            raise ValueError(f"the tokenizer names a special token {token!r} that its vocabulary does not hold")
        special.append((token, index))
    # passed as lists: in a template string, a colon or a space inside a token would be taken for syntax
    backend.post_processor = TemplateProcessing(single=parts, special_tokens=special)


def configured_eos(directory: Path) -> tuple[int, ...]:
    """The end-of-text ids of a Hugging Face directory: `generation_config.json`, else `config.json`."""
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(directory / name).get("eos_token_id")
        if value is not None:
            return merge_ids(value)
    return ()


def merge_ids(*values: int | Sequence[int] | None) -> tuple[int, ...]:
    """All ids of `values` (each one id, several, or None), in order and without repeats."""
    ids: list[int] = []
    for value in values:
        ids += [] if value is None else [value] if isinstance(value, int) else list(value)
    return tuple(dict.fromkeys(ids))


def _directory_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
