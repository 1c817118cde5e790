"""`paged-jax generate`."""

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import tyro

from paged_jax.commands import BAR_FORMAT, PROGRAM, UsageError
from paged_jax.config import SIMULATED_ONLY, EngineConfig, parse
from paged_jax.flags import as_flags, flags_of, values_of
from paged_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paged_jax.engine.request import Request
    from paged_jax.llm import LLM

_SAMPLING_NAMES = {"seed": "sampling_seed"}  # --seed is the engine's
_NOT_STREAMED = ("n", "logprobs")  # one sample is streamed, and nothing but its text
_SAMPLING_DEFAULTS = {
    f.name: f.default for f in dataclasses.fields(SamplingParams) if f.init and f.name not in _NOT_STREAMED
} | {"temperature": 0.0, "max_tokens": 128}
_NO_LOGPROBS = {"max_logprobs": 0}  # programs are smaller without
_ENGINE_DEFAULTS = {
    name: f.default for name, f in EngineConfig.model_fields.items() if name not in (*_NO_LOGPROBS, *SIMULATED_ONLY)
}

_SamplingFlags = flags_of(SamplingParams, _SAMPLING_DEFAULTS, names=_SAMPLING_NAMES)
_EngineFlags = flags_of(EngineConfig, _ENGINE_DEFAULTS, notes={"debug": "Also show the traceback of an error."})


@dataclass(frozen=True)
class Generate:
    """Complete one prompt and stream the text.

    Only the text goes to standard output; progress and errors go to standard error. Sampling is greedy unless
    --temperature is given. The model is a name of the catalogue (see `paged-jax models`), a Hugging Face
    directory, a .gguf file, or a hub id (org/name).

    examples:
        paged-jax generate --prompt "The capital of France is" --max-tokens 20
        paged-jax generate --chat --prompt "Name three colours." --temperature 0.7 --top-p 0.9
        paged-jax generate --prompt - --stats < prompt.txt
        paged-jax generate --prompt "Once upon a time" --block-size 32 --dtype bfloat16
    """

    needs: ClassVar[str] = "--prompt"

    prompt: str
    """What to complete; - reads it from standard input. If it begins with a dash, write --prompt=-x."""
    model: str = "smollm2-135m"
    """Name in the catalogue, directory, .gguf file or hub id."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """Take the prompt for a user's message and answer it, through the model's chat template."""
    stats: tyro.conf.FlagCreatePairsOff[bool] = False
    """Afterwards, write token counts, seconds and tokens per second to standard error."""
    sampling: tyro.conf.OmitArgPrefixes[_SamplingFlags] = field(default_factory=_SamplingFlags)
    engine: tyro.conf.OmitArgPrefixes[_EngineFlags] = field(default_factory=_EngineFlags)

    def __call__(self) -> None:
        """Load the model, compile what this prompt needs, then write the text as it becomes certain."""
        params, config = self._settings()
        prompt = _read_prompt() if self.prompt == "-" else self.prompt
        try:
            self._generate(prompt, params, config)
        except ValueError as error:  # the model may refuse what the settings alone allow
            raise ValueError(as_flags(str(error), _SAMPLING_DEFAULTS | _ENGINE_DEFAULTS)) from error

    def _settings(self) -> tuple[SamplingParams, EngineConfig]:
        try:
            params = SamplingParams(**values_of(self.sampling, _SAMPLING_NAMES))
        except ValueError as error:
            raise UsageError(as_flags(str(error), _SAMPLING_DEFAULTS, _SAMPLING_NAMES)) from error
        try:
            return params, parse(EngineConfig, values_of(self.engine) | _NO_LOGPROBS)
        except ValueError as error:
            raise UsageError(as_flags(str(error), _ENGINE_DEFAULTS)) from error

    def _generate(self, prompt: str, params: SamplingParams, config: EngineConfig) -> None:
        from tqdm import tqdm

        from paged_jax.checkpoints.resolve import prepare

        prepare(self.model, config.load_format)
        with tqdm(
            total=1,
            desc="loading",
            bar_format=BAR_FORMAT,
            leave=False,
        ) as bar:
            from paged_jax.llm import LLM, text_pieces

            llm = LLM(self.model, **config.model_dump())
            tokens = self._tokens(llm, prompt)
            llm.engine.check_request(tokens, params)  # before minutes of compiling
            _compile(llm, len(tokens), bar)
            request = llm.engine.add_request(PROGRAM, tokens, params)  # not llm.stream: it is counted afterwards
        try:
            for piece in text_pieces(llm.engine, request):
                print(piece, end="", flush=True)
        finally:
            print()  # so that what follows, a sentence about an interrupt for one, begins a line
        if self.stats:
            print(_statistics(llm, request), file=sys.stderr)

    def _tokens(self, llm: "LLM", prompt: str) -> list[int]:
        if self.chat:
            return llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        return llm.tokenizer.encode(prompt)


def _read_prompt() -> str:
    """Standard input, without the newline that ends its last line."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on standard input is not {error.encoding}: {error.reason}") from error


def _compile(llm: "LLM", num_prompt_tokens: int, bar: Any) -> None:
    """Compile the programs that one request needs: for its chunks of prompt and for single tokens."""
    from paged_jax.execution.buckets import pick_bucket

    executor, budget = llm.engine.executor, llm.engine.config.max_num_batched_tokens
    sizes = {min(num_prompt_tokens, budget), num_prompt_tokens % budget or budget, 1}
    buckets = {pick_bucket(executor.buckets, min(size, num_prompt_tokens)) for size in sizes}

    def show(done: int, total: int) -> None:
        bar.n, bar.total = 1 + done, 1 + total
        bar.set_description_str("compiling")

    show(0, len(buckets))
    executor.warm_up(show, sorted(buckets, key=lambda bucket: bucket.num_tokens), moves=False)


def _statistics(llm: "LLM", request: "Request") -> str:
    """What `--stats` says of a request that has ended."""
    metrics, executor = request.metrics, llm.engine.executor
    tokens, compiled = request.num_output_tokens, executor.num_compilations
    begun = metrics.first_scheduled_time or metrics.arrival_time
    seconds = (metrics.finished_time or begun) - begun
    first = (metrics.first_token_time or begun) - begun
    return (
        f"{request.num_prompt_tokens} prompt tokens, {tokens} output tokens ({request.finish_reason}) in "
        f"{seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s, the first after {first:.2f} s; "
        f"before that, {compiled} program{'s' * (compiled != 1)} compiled in {executor.compile_seconds:.1f} s"
    )
