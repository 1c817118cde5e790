"""Typed, strict settings of the engine: an unknown key, a wrong type or an impossible pair is an error."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# one literal, not a union with "auto": a wrong value is then one problem, not one for each member
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "float8", "int8"]

POLICIES = {
    "batching": {
        "continuous": "paged_jax.engine.policies.continuous:ContinuousBatching",
        "static": "paged_jax.engine.policies.static:StaticBatching",
    },
    "scheduling_policy": {
        "fcfs": "paged_jax.engine.policies.fcfs:FCFSQueue",
        "priority": "paged_jax.engine.policies.priority:PriorityQueue",
        "sjf": "paged_jax.engine.policies.sjf:ShortestJobFirst",
        "srpt": "paged_jax.engine.policies.srpt:ShortestRemainingTime",
        "longest_prefix_match": "paged_jax.engine.policies.longest_prefix_match:LongestPrefixMatch",
        "fair": "paged_jax.engine.policies.fair:FairQueue",
    },
    "length_predictor": {
        "given": "paged_jax.engine.policies.given_length:GivenLength",
        "oracle": "paged_jax.engine.policies.oracle_length:OracleLength",
        "prompt_length": "paged_jax.engine.policies.prompt_length:PromptLength",
        "constant": "paged_jax.engine.policies.constant_length:ConstantLength",
    },
    "preemption_mode": {
        "recompute": "paged_jax.engine.policies.recompute:Recompute",
        "swap": "paged_jax.engine.policies.swap:SwapOut",
        "auto": "paged_jax.engine.policies.auto_preemption:AutoPreemption",
    },
    "victim_policy": {
        "last_arrived": "paged_jax.engine.policies.last_arrived:LastArrivedVictim",
        "longest_remaining": "paged_jax.engine.policies.longest_remaining:LongestRemainingVictim",
        "most_blocks": "paged_jax.engine.policies.most_blocks:MostBlocksVictim",
        "fewest_tokens_lost": "paged_jax.engine.policies.fewest_tokens_lost:FewestTokensLostVictim",
        "lowest_priority": "paged_jax.engine.policies.lowest_priority:LowestPriorityVictim",
    },
    "allocator": {
        "paged": "paged_jax.kv_cache.manager:KVCacheManager",
        "reserve_max": "paged_jax.kv_cache.reservation:ReserveMax",
        "reserve_pow2": "paged_jax.kv_cache.reservation:ReservePow2",
        "reserve_oracle": "paged_jax.kv_cache.reservation:ReserveOracle",
    },
    "prefix_cache": {
        "hash": "paged_jax.kv_cache.prefix_cache.hash:HashPrefixCache",
        "radix": "paged_jax.kv_cache.prefix_cache.radix:RadixPrefixCache",
        "none": "paged_jax.kv_cache.prefix_cache.none:NoPrefixCache",
    },
    "eviction": {
        "lru": "paged_jax.kv_cache.eviction.lru:LRUEviction",
        "lfu": "paged_jax.kv_cache.eviction.lfu:LFUEviction",
        "fifo": "paged_jax.kv_cache.eviction.fifo:FIFOEviction",
        "cost": "paged_jax.kv_cache.eviction.cost:CostEviction",
        "belady": "paged_jax.kv_cache.eviction.belady:BeladyEviction",
    },
}
"""Short names of policies, by config field, and the classes they mean."""

RESERVATIONS = ("reserve_max", "reserve_pow2", "reserve_oracle")
"""Allocators that give a request one contiguous run of blocks for all the tokens it may ever have."""


DEFAULT_CPU_KV_CACHE_MEMORY = 2**30
"""Bytes of KV pages on a CPU when nothing sets their size."""


DEFAULT_SWAP_SPACE = 2**30
"""Bytes of host memory for swapping when nothing sets their size."""


class StrictModel(BaseModel):
    """A frozen settings object that refuses unknown keys and silent type changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, values: Any) -> Any:
        """Lists, as callers and files write them, are taken for the tuples that a frozen object can hold."""
        if not isinstance(values, Mapping):
            return values
        return {key: _as_tuples(value) if isinstance(value, list) else value for key, value in values.items()}


class EngineConfig(StrictModel):
    """How requests are batched and how KV memory is managed. The names are vLLM's where vLLM has one."""

    block_size: Annotated[int, Field(ge=1, le=512)] = 16
    """Tokens per KV block (page)."""
    num_blocks: Annotated[int, Field(ge=1)] | None = None
    """Usable KV blocks; unset, as many as the memory budget holds."""
    kv_cache_memory: Annotated[int, Field(ge=1)] | None = None
    """Bytes for KV pages; unset, 1 GiB on a CPU. Refused together with num_blocks or memory_utilization."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of an accelerator's memory to use, weights included; unset, 0.9. Refused on a CPU."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 16
    """Most requests that run at once."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 512
    """Most tokens computed in one step, decodes and prefill chunks together."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of a request, prompt and output together; unset, what the model was trained for."""
    dtype: DType = "auto"
    """Of weights and activations; auto is float32 on a CPU, else the checkpoint's own."""
    kv_cache_dtype: KVDType = "auto"
    """Of the KV pages; auto is the same as dtype. float8 and int8 are for the simulated device so far."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Devices that share every layer's heads and matrices; more than 1 for the simulated device only, so far."""
    enforce_eager: bool = False
    """No padding to buckets, every kernel launched by the host: for the simulated device only (a JAX step is always
    compiled)."""
    enable_chunked_prefill: bool = True
    """Split prompts into chunks that share steps with decodes. Off, a prompt must fit one step's budget."""
    batching: str = "continuous"
    """Who shares a batch: "continuous" (decided at every step), "static" (fixed until all of it is done), or
    "package.module:Class"."""
    budget_order: Literal["decode_first", "prefill_first"] = "decode_first"
    """Who gets a step's token budget first: running decodes, or prompts, which may then hold decodes up for as long as
    they keep coming."""
    allocator: str = "paged"
    """How KV memory is given out: "paged", Orca's contiguous "reserve_max", "reserve_pow2" and "reserve_oracle", or
    "package.module:Class"."""
    prefix_cache: str | None = None
    """Reuse of KV blocks between requests: "hash", "radix", "none", or "package.module:Class"; unset, "hash" with paged
    memory and "none" with reservations."""
    eviction: str | None = None
    """Which unused cached block is given up first: "lru" (when unset), "lfu", "fifo", "cost", "belady" (knows the
    future: for replay), or "package.module:Class"."""
    scheduling_policy: str = "fcfs"
    """Order of the waiting queue: "fcfs", "priority", "sjf", "srpt", "longest_prefix_match", "fair", or
    "package.module:Class"."""
    aging_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds after its arrival from which on a waiting request goes before all that came later, whatever the
    policy; unset, 60 with "priority" and never with "sjf", "srpt" and "longest_prefix_match"."""
    fair_quantum: Annotated[int, Field(ge=1)] | None = None
    """Tokens that "fair" grants each user in a round; unset, 512."""
    length_predictor: str | None = None
    """Whence "sjf", "srpt", "fair" and "longest_remaining" know output lengths: "given" (when unset: the true one if
    the workload tells it, else max_tokens), "oracle" (nothing but the true one), "prompt_length" (as long as the
    prompt), "constant", or "package.module:Class"."""
    constant_output_len: Annotated[int, Field(ge=1)] | None = None
    """What "constant" predicts, and "given" where nothing is given; unset, 256 tokens."""
    preemption_mode: str = "recompute"
    """What becomes of a preempted request's keys and values: "recompute", "swap" (to host memory and back), "auto" (the
    cheaper one), or "package.module:Class"."""
    victim_policy: str = "last_arrived"
    """Who is preempted when blocks run out: "last_arrived", "longest_remaining", "most_blocks", "fewest_tokens_lost",
    "lowest_priority", or "package.module:Class"."""
    max_preemptions: Annotated[int, Field(ge=0)] = 8
    """A request preempted this often is spared while others run; of spared ones the last to arrive gives way."""
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the blocks that admission leaves free for those who run already."""
    num_swap_blocks: Annotated[int, Field(ge=0)] | None = None
    """Blocks of host memory for swapping; unset, as many as swap_space holds."""
    swap_space: Annotated[int, Field(ge=0)] | None = None
    """Bytes of host memory for swapping; unset, 1 GiB. Refused together with num_swap_blocks."""
    swap_block_cost: Annotated[float, Field(ge=0)] | None = None
    """Tokens whose recomputation costs as much as moving one block to the host and back, for "auto"; unset, 4."""
    max_logprobs: Annotated[int, Field(ge=0, le=1024)] = 20
    """Most log-probabilities that a request may ask for with each token, and most candidates of a beam."""
    trace_file: str | None = None
    """Where every decision is written, one JSON line per event, for `paged-jax replay` and `diff`."""
    attention_implementation: Literal["auto", "reference", "xla", "mosaic_tpu", "mosaic_gpu", "triton"] = "auto"
    """Which ragged_paged_attention runs; auto is the kernel of the platform that serves the model, else xla."""
    attention_interpret: bool = False
    """Run the kernel that attention_implementation names in Pallas' interpreter, on any platform (very slow)."""
    layer_loop: Literal["auto", "unrolled", "scanned"] = "auto"
    """Unrolled layers run faster on a CPU, scanned ones compile faster; auto picks by platform."""
    token_buckets: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Padded batch sizes, ascending, the last one max_num_batched_tokens; unset, powers of four and two."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the model's shape, made from the seed."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seeds dummy weights and the sampling of requests that bring no seed of their own."""
    debug: bool = False
    """Check the KV accounting and the block ids at every step, and fill freed pages with NaN (slow)."""

    @model_validator(mode="before")
    @classmethod
    def _short_names(cls, values: Any) -> Any:
        """A policy of ours that is named by its path is the same as by its short name, also for the rules below."""
        if not isinstance(values, Mapping):
            return values
        short = {field: {path: name for name, path in known.items()} for field, known in POLICIES.items()}
        return {
            key: short[key].get(value, value) if key in short and isinstance(value, str) else value
            for key, value in values.items()
        }

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("num_blocks and kv_cache_memory both set the size of the KV cache: give one of them")
        if self.kv_cache_memory is not None and self.memory_utilization is not None:
            raise ValueError(
                "kv_cache_memory and memory_utilization both set the size of the KV cache: give one of them"
            )
        if self.num_blocks is not None and self.memory_utilization is not None:
            raise ValueError("num_blocks and memory_utilization both set the size of the KV cache: give one of them")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}): a step could not hold one token of each running request"
            )
        for name in POLICIES:
            if getattr(self, name) is not None:
                policy_path(name, getattr(self, name))
        self._check_policies()
        if self.attention_interpret and self.attention_implementation in ("auto", "reference", "xla"):
            raise ValueError(
                f"attention_interpret has no effect with attention_implementation {self.attention_implementation!r}: "
                "name a kernel, or leave it unset"
            )
        buckets = self.token_buckets
        if buckets is not None and self.enforce_eager:
            raise ValueError("token_buckets has no effect with enforce_eager, which pads nothing: leave it unset")
        if buckets is not None:
            if not buckets or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"token_buckets {list(buckets)} must be a non-empty ascending list without repeats")
            if buckets[-1] != self.max_num_batched_tokens:
                raise ValueError(
                    f"the last of token_buckets ({buckets[-1]}) must equal max_num_batched_tokens "
                    f"({self.max_num_batched_tokens})"
                )
        return self

    def _check_policies(self) -> None:
        """Refuse pairs that cannot work and settings that no policy reads."""
        if self.allocator in RESERVATIONS and self.prefix_cache not in (None, "none"):
            raise ValueError(
                f"allocator {self.allocator!r} gives each request one contiguous run of blocks, which nobody else can "
                f"share: leave prefix_cache ({self.prefix_cache!r}) unset"
            )
        if self.prefix_cache_name == "none" and self.eviction is not None:
            why = "prefix_cache 'none'" if self.prefix_cache else f"allocator {self.allocator!r}, which shares nothing"
            raise ValueError(f"eviction has no effect with {why}: leave it unset")
        if self.scheduling_policy == "longest_prefix_match" and self.prefix_cache_name == "none":
            raise ValueError(
                "scheduling_policy 'longest_prefix_match' asks the prefix cache, and there is none: "
                "choose another policy or a prefix_cache"
            )
        if self.allocator in RESERVATIONS:
            self._check_unused_preemption()
        if self.num_swap_blocks is not None and self.swap_space is not None:
            raise ValueError("num_swap_blocks and swap_space both set the size of host memory: give one of them")
        for field, readers in READERS.items():
            if getattr(self, field) is None:
                continue
            # a policy of one's own may read any setting
            if not any(
                ":" in getattr(self, other) or getattr(self, other) in names for other, names in readers.items()
            ):
                wanted = " or ".join(f"{other} {' or '.join(map(repr, names))}" for other, names in readers.items())
                raise ValueError(f"{field} has no effect without {wanted}: leave it unset")
        if self.constant_output_len is not None and self.length_predictor not in (None, "given", "constant"):
            raise ValueError(
                f"constant_output_len has no effect with length_predictor {self.length_predictor!r}: leave it unset"
            )
        if self.batching == "static" and self.scheduling_policy == "srpt":
            raise ValueError(
                "scheduling_policy 'srpt' takes places of requests that run, and batching 'static' fixes a batch until "
                "it is done: use 'sjf'"
            )

    def _check_unused_preemption(self) -> None:
        """Requests with reservations never grow, so that nobody gives way but those whose place `srpt` takes."""
        unused = ["watermark"]
        if self.scheduling_policy != "srpt" and ":" not in self.scheduling_policy:
            unused += ["preemption_mode", "victim_policy", "max_preemptions"]
        for field in unused:
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(
                    f"{field} has no effect with allocator {self.allocator!r}, whose requests never grow: leave it "
                    "unset"
                )

    @property
    def prefix_cache_name(self) -> str:
        """The prefix cache in use, unset or not."""
        return self.prefix_cache or ("none" if self.allocator in RESERVATIONS else "hash")


READERS: dict[str, dict[str, tuple[str, ...]]] = {
    "aging_s": {"scheduling_policy": ("priority", "sjf", "srpt", "longest_prefix_match")},
    "fair_quantum": {"scheduling_policy": ("fair",)},
    "length_predictor": {"scheduling_policy": ("sjf", "srpt", "fair"), "victim_policy": ("longest_remaining",)},
    "constant_output_len": {"scheduling_policy": ("sjf", "srpt", "fair"), "victim_policy": ("longest_remaining",)},
    "num_swap_blocks": {"preemption_mode": ("swap", "auto")},
    "swap_space": {"preemption_mode": ("swap", "auto")},
    "swap_block_cost": {"preemption_mode": ("auto",)},
}
"""Settings that only some policies read, and which."""


SIMULATED_ONLY = ("tensor_parallel_size", "enforce_eager")
"""Settings that only a simulated device can have, so far."""


def check_real(config: EngineConfig) -> None:
    """Raise ValueError for a setting that only a simulated device can have."""
    for field in SIMULATED_ONLY:
        if getattr(config, field) != type(config).model_fields[field].default:
            raise ValueError(f"{field} is for the simulated device only: leave it unset, or use executor simulated")
    if config.kv_cache_dtype in ("float8", "int8"):
        raise ValueError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} is for the simulated device only, so far: choose another, or "
            "use executor simulated"
        )


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(v) for v in value) if isinstance(value, list | tuple) else value


def policy_path(field: str, name: str) -> str:
    """The `package.module:Class` that `name`, a short name or such a path, means in config field `field`.

    Raises ValueError, naming the field, when it is neither; nothing is imported.
    """
    known = POLICIES[field]
    path = known.get(name, name)
    module, colon, class_name = path.partition(":")
    if not (colon and module and class_name.isidentifier()) or module.startswith("."):
        raise ValueError(f"unknown {field} {name!r}{nearest(name, list(known))} (or give package.module:Class)")
    return path


def nearest(name: str, known: list[str]) -> str:
    """The words `; did you mean 'x'?` for the closest of `known`, or a list of them when none is close."""
    match = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(sorted(known))}"


def parse[T: StrictModel](model: type[T], values: dict[str, Any], where: str = "") -> T:
    """Build `model` from plain values; every problem becomes one ValueError sentence that names the key.

    `where` is the dotted path of the values inside their file, such as `engine`, put before key names.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # each member of a union complains about a value that none of them takes: one problem, one sentence
        problems: dict[tuple[str, str], list[Any]] = {}
        for e in error.errors():
            problems.setdefault((_key(model, e, where), repr(e["input"])), []).append(e)
        raise ValueError("; ".join(_sentence(model, k, e) for (k, _), e in problems.items())) from None


def _key(model: type[StrictModel], error: Any, where: str) -> str:
    """The dotted path as a person wrote it: pydantic puts the names of union members into it as well."""
    path = [str(p) for p in error["loc"]]
    own = [p for i, p in enumerate(path) if i == 0 or p.isdigit() or p in model.model_fields]
    return ".".join([where] * bool(where) + own)


def _sentence(model: type[StrictModel], key: str, errors: list[Any]) -> str:
    """What is wrong with one key."""
    first = errors[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}{nearest(str(first['loc'][-1]), list(model.model_fields))}"
    if first["type"] == "missing":
        return f"{key} is missing"
    messages = [e["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list") for e in errors]
    if not first["loc"]:  # a rule about several keys: printing all of them would hide the sentence
        return messages[0]
    return f"{key}: {' or '.join(m[0].lower() + m[1:] for m in messages)}, got {first['input']!r}"
