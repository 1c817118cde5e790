"""The facade: load a model, generate."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from paged_jax.checkpoints.resolve import Checkpoint, resolve
from paged_jax.checkpoints.tokenizer import Tokenizer
from paged_jax.config import DEFAULT_CPU_KV_CACHE_MEMORY, DEFAULT_SWAP_SPACE, EngineConfig, check_real, parse
from paged_jax.engine.clock import Clock, WallClock
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request
from paged_jax.engine.trace_file import check_trace_file
from paged_jax.execution.buckets import make_buckets
from paged_jax.execution.jax_executor import JaxExecutor, bytes_per_block
from paged_jax.models.decoder import Decoder, stack_layers
from paged_jax.models.weights import dummy_decoder, load_decoder
from paged_jax.outputs import RequestOutput
from paged_jax.sampling.params import BeamSearchParams, SamplingParams
from pallas_kernels.paged_attention import KERNELS, page_backend

DEFAULT_MEMORY_UTILIZATION = 0.9

type Prompt = str | Mapping[str, Any]
type Message = Mapping[str, str]


class EngineFactory:
    """Builds engines over one model: its weights are loaded once for each dtype and shared by all."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._checkpoints: dict[str, Checkpoint] = {}
        self._decoders: dict[tuple[Any, ...], Decoder] = {}

    def __call__(self, config: EngineConfig, *, clock: Clock | None = None) -> Engine:
        """An engine with a KV cache of its own. Raises ValueError for settings that this model cannot have."""
        if config.trace_file is not None:
            check_trace_file(config.trace_file)  # before the weights are loaded
        check_real(config)
        backend = jax.default_backend()
        attention = None if config.attention_implementation == "auto" else config.attention_implementation
        if attention in KERNELS and page_backend(attention) != backend and not config.attention_interpret:
            raise ValueError(
                f"attention_implementation {attention!r} is for a {page_backend(attention).upper()}, not a "
                f"{backend.upper()}: choose 'auto', or set attention_interpret to run it in Pallas' interpreter, slowly"
            )
        checkpoint = self._checkpoint(config)
        kv_dtype = (
            _dtype(config, checkpoint, backend) if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)
        )
        max_model_len = _max_model_len(config, checkpoint)
        decoder = self.decoder(config)
        per_block = bytes_per_block(decoder.cache_groups, config.block_size, kv_dtype, page_backend(attention))
        num_blocks = _num_blocks(config, per_block, backend)
        sees_all = any(group.sliding_window is None for group in decoder.cache_groups)
        executor = JaxExecutor(
            decoder,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_request_len=min(max_model_len, num_blocks * config.block_size) if sees_all else max_model_len,
            max_num_seqs=config.max_num_seqs,
            buckets=make_buckets(config),
            kv_dtype=kv_dtype,
            num_swap_blocks=_num_swap_blocks(config, per_block),
            max_logprobs=min(config.max_logprobs, checkpoint.config.vocab_size),
            attention_implementation=attention,
            attention_interpret=config.attention_interpret,
            debug=config.debug,
        )
        return Engine(
            config,
            executor,
            clock=clock or WallClock(),
            tokenizer=checkpoint.tokenizer,
            max_model_len=max_model_len,
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
        )

    def _checkpoint(self, config: EngineConfig) -> Checkpoint:
        if config.load_format not in self._checkpoints:
            self._checkpoints[config.load_format] = resolve(self.model, config.load_format)
        return self._checkpoints[config.load_format]

    def decoder(self, config: EngineConfig) -> Decoder:
        """The model with its weights, as an engine of these settings runs it; loaded once for each dtype."""
        backend, checkpoint = jax.default_backend(), self._checkpoint(config)
        dtype = _dtype(config, checkpoint, backend)
        scanned = None if config.layer_loop == "auto" else config.layer_loop == "scanned"
        seed = config.seed if checkpoint.tensors is None else None
        key = (dtype, scanned, seed)
        if key not in self._decoders:
            if checkpoint.tensors is None:
                decoder = dummy_decoder(checkpoint.config, config.seed, dtype)
            else:
                decoder = load_decoder(checkpoint.config, checkpoint.tensors, dtype)
            if scanned or (scanned is None and backend != "cpu" and decoder.can_stack):
                decoder = stack_layers(decoder)
            self._decoders[key] = decoder
        return self._decoders[key]


def build_engine(model: str, config: EngineConfig, *, clock: Clock | None = None) -> Engine:
    """An engine over a model: a catalogue name, a Hugging Face directory, a .gguf file or a hub id."""
    return EngineFactory(model)(config, clock=clock)


def _dtype(config: EngineConfig, checkpoint: Checkpoint, backend: str) -> jnp.dtype:
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if backend == "cpu" else checkpoint.config.dtype)


def _max_model_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    trained = checkpoint.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ValueError(
            f"max_model_len ({config.max_model_len}) is more than the {trained} tokens of {checkpoint.name}"
        )
    return config.max_model_len or trained


def _num_blocks(config: EngineConfig, per_block: int, backend: str) -> int:
    """Usable blocks: as configured, or as many as the budget holds beside each layer's null block.

    `per_block` is a block's bytes in the physical page shape.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if backend == "cpu":
        if config.memory_utilization is not None:
            raise ValueError("memory_utilization has no effect on a CPU: set kv_cache_memory")
        budget = config.kv_cache_memory or DEFAULT_CPU_KV_CACHE_MEMORY
    elif config.kv_cache_memory is not None:
        budget = config.kv_cache_memory
    else:
        stats = jax.local_devices()[0].memory_stats()
        share = config.memory_utilization or DEFAULT_MEMORY_UTILIZATION
        budget = int(stats["bytes_limit"] * share) - stats["bytes_in_use"]
    count = budget // per_block - 1
    if count < 1:
        raise ValueError(
            f"the KV budget of {budget:,} bytes does not hold two blocks of {per_block:,} bytes: "
            "give more memory or a smaller block_size"
        )
    return count


def _num_swap_blocks(config: EngineConfig, per_block: int) -> int:
    """Blocks of host memory: as configured, or as many as its budget holds; none if nothing is ever swapped."""
    if config.preemption_mode == "recompute":
        return 0
    if config.num_swap_blocks is not None:
        return config.num_swap_blocks
    return (DEFAULT_SWAP_SPACE if config.swap_space is None else config.swap_space) // per_block


class LLM:
    """A model ready to generate, after vLLM's class of the same name.

    Args:
        model: a catalogue name, a Hugging Face directory, a .gguf file or a hub id.
        **engine: fields of `EngineConfig`, such as `block_size=32`.

    Raises ValueError or FileNotFoundError, one sentence, for a model or settings that cannot work.
    """

    def __init__(self, model: str = "smollm2-135m", **engine: Any) -> None:
        self.engine = build_engine(model, parse(EngineConfig, engine))
        self._request_ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own; ValueError if it has none."""
        if self.engine.tokenizer is None:
            raise ValueError("this model has no tokenizer")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a string, `{"prompt": "..."}` or `{"prompt_token_ids": [...]}`.

        The mappings may also have `cache_salt`, `user` and `expected_output_len`, see `Engine.add_request`. Results
        come in the prompts' order. One `sampling_params` serves all prompts, a sequence gives each its own; `priority`
        has one number for each prompt, lower being more urgent. Raises ValueError, naming the prompt, before anything
        runs when one of them cannot be served.
        """
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = _params(sampling_params, len(prompts))
        return self._generate([_prompt(p) for p in prompts], params, use_tqdm, priority)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """The `beam_width` best continuations of each prompt, best first; prompts as for `generate`.

        Beams share the blocks of what they have in common. Raises ValueError, naming the prompt, before anything runs
        when one of them cannot be served.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"beam_search takes BeamSearchParams, got {params!r}")
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        return self._generate([_prompt(p) for p in prompts], [params] * len(prompts), use_tqdm)

    def update_weights(self, model: str) -> None:
        """Go on with the weights of another checkpoint of the same shape, named as in the constructor.

        What the old weights have computed is of no use: cached prefixes are forgotten. Tokenizer and end tokens stay
        the old ones; until this returns both sets of weights are in memory. Raises ValueError when the
        shapes differ, or while requests are unfinished; nothing is changed then.
        """
        self.engine.check_idle()  # before the weights are loaded
        self.engine.update_weights(EngineFactory(model).decoder(self.engine.config))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several: messages are `{"role": ..., "content": ...}`."""
        if isinstance(messages, str | Mapping):
            raise ValueError('chat takes a list of messages such as {"role": "user", "content": "Hello"}')
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [{"prompt": self.tokenizer.encode_chat([dict(m) for m in c])} for c in conversations]
        return self._generate(prompts, _params(sampling_params, len(prompts)), use_tqdm)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Complete one prompt, or answer one conversation, and yield the text piece by piece as it becomes certain.

        What might still turn out to be part of a stop string is held back. Closing the iterator aborts the request.
        A prompt that cannot be served, or asked for more than one sample's text, is refused when the first piece is
        asked for.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"a stream takes one SamplingParams, got {params!r}")
        if params.n > 1 or params.logprobs is not None:
            raise ValueError("a stream is the text of one sample: for n or logprobs use generate")
        tokenizer = self.tokenizer  # without one there would be no text
        if isinstance(prompt, str | Mapping):
            wanted = _prompt(prompt)
        else:
            wanted = {"prompt": tokenizer.encode_chat([dict(m) for m in prompt])}
        request = self._add([wanted], [params])[0]
        try:
            yield from text_pieces(self.engine, request)
        finally:
            self.engine.abort(request.request_id)

    def _generate(
        self,
        prompts: list[dict[str, Any]],
        params: Sequence[SamplingParams | BeamSearchParams],
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        requests = self._add(prompts, params, priority)
        samples = [sample for request in requests for sample in request.samples]
        try:
            with tqdm(total=len(samples), desc="generate", unit="request", disable=not use_tqdm) as bar:
                tokens = 0
                while not all(sample.is_finished for sample in samples):
                    advanced = self.engine.step()
                    tokens += len(advanced)
                    seconds = bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{tokens / max(seconds, 1e-9):.0f} tokens/s", refresh=False)
                    bar.update(sum(request.is_finished for request in advanced))
        finally:
            for request in requests:  # those that an interrupt has left unfinished
                self.engine.abort(request.request_id)
        return [RequestOutput.from_request(request, self.engine.tokenizer) for request in requests]

    def _add(
        self,
        prompts: Sequence[dict[str, Any]],
        params: Sequence[SamplingParams | BeamSearchParams],
        priority: Sequence[int] | None = None,
    ) -> list[Request]:
        """Queue all prompts, or none if one is refused."""
        if isinstance(priority, int):
            raise ValueError(f"priority must be a list with one number for each prompt, got {priority!r}")
        urgency = [0] * len(prompts) if priority is None else list(priority)
        if len(urgency) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(urgency)} priorities: give one for each")
        requests: list[Request] = []
        try:
            for index, (prompt, own, urgent) in enumerate(zip(prompts, params, urgency, strict=True)):
                try:
                    request_id = str(next(self._request_ids))
                    requests.append(self.engine.add_request(request_id, params=own, priority=urgent, **prompt))
                except ValueError as error:
                    raise ValueError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return requests


def text_pieces(engine: Engine, request: Request) -> Iterator[str]:
    """The text of a request that is queued, piece by piece as it becomes certain; steps the engine until it ends."""
    shown = 0
    while not request.is_finished:
        engine.step()
        text = request.text.text if request.text else ""
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)


def _params(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """The sampling params of each of `count` prompts."""
    one = SamplingParams() if given is None else given
    params = list(given) if isinstance(given, list | tuple) else [one] * count
    for own in params:
        if not isinstance(own, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, one or one for each prompt, got {own!r}")
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} sampling params: give one, or one for each")
    return params


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """The keywords of `Engine.add_request` that a prompt stands for."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    extras = ("cache_salt", "user", "expected_output_len")
    keys = set(prompt) - set(extras) if isinstance(prompt, Mapping) else set()
    if keys not in ({"prompt"}, {"prompt_token_ids"}):
        raise ValueError(
            'a prompt is a string, {"prompt": "..."} or {"prompt_token_ids": [...]}, if need be with cache_salt, user '
            "or expected_output_len"
        )
    (key,) = keys
    return {"prompt": prompt[key], **{name: prompt[name] for name in extras if name in prompt}}
