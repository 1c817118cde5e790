"""The command line: what it prints, what it refuses and with which words, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

import pytest
import tokenizers
import tyro
from recorded_runs import three
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from paged_jax import __version__, cli
from paged_jax.cli import COMMANDS, main
from paged_jax.config import SIMULATED_ONLY, EngineConfig

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SMOKE = str(CONFIGS / "smoke.yaml")


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The sentence, after the progress that may stand before it."""
        last = self.err.replace("\r", "\n").rstrip("\n").rpartition("\n")[2]
        assert last.startswith("paged-jax: error: "), self.err
        return last.removeprefix("paged-jax: error: ")


type Program = Callable[..., Ended]


@pytest.fixture
def paged_jax(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Program:
    """Runs the program in this process."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return Ended(ended.value.code, out, err)

    return run


@pytest.fixture
def do(paged_jax: Program, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Runs `paged-jax models` with something else in its place."""

    def run(action: Callable[[], None], *arguments: str) -> Ended:
        monkeypatch.setattr(cli.Models, "__call__", lambda self: action())
        return paged_jax("models", *arguments)

    return run


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def action() -> NoReturn:
        raise error

    return action


GENERATE = ["generate", "--prompt", "a"]

USAGE_ERRORS = [
    (["genrate"], "unknown command 'genrate'; did you mean 'generate'?"),
    (["xyz"], "unknown command 'xyz'; commands: generate, run, plot, replay, diff, "),
    (["--hlp"], "unknown flag '--hlp'; did you mean '--help'?"),
    (["generate"], "paged-jax generate needs --prompt: see `paged-jax generate --help`"),
    (["generate", "--prompt"], "--prompt needs a value (one that begins with a dash is written --prompt=-x)"),
    (["generate", "--prompt", "--chat"], "--prompt needs a value"),
    ([*GENERATE, "b"], "paged-jax generate cannot place 'b'"),
    ([*GENERATE, "--block-sise", "3"], "unknown flag '--block-sise'; did you mean '--block-size'"),
    ([*GENERATE, "-x"], "unknown flag '-x'; see `paged-jax generate --help`"),
    ([*GENERATE, "--max-logprobs", "3"], "unknown flag '--max-logprobs'"),
    ([*GENERATE, "--block-size", "0"], "--block-size: input should be greater than or equal to 1"),
    ([*GENERATE, "--block-size", "x"], "--block-size: input should be a valid integer, got 'x'"),
    ([*GENERATE, "--block-size", "-3"], "--block-size: input should be greater than or equal to 1"),
    ([*GENERATE, "--dtype", "float64"], "--dtype: input should be 'auto', 'float32'"),
    ([*GENERATE, "--prefix-cache", "hsah"], "unknown --prefix-cache 'hsah'; did you mean 'hash'?"),
    ([*GENERATE, "--token-buckets", "8"], "the last of --token-buckets (8) must equal"),
    ([*GENERATE, "--top-p", "2"], "--top-p must be a number above 0 and at most 1, got 2"),
    ([*GENERATE, "--max-tokens", "0"], "--max-tokens must be None or a whole number, 1 or more"),
    ([*GENERATE, "--sampling-seed", "-1"], "--sampling-seed must be None or a whole number"),
    ([*GENERATE, "--stop="], "--stop must be a non-empty string"),
    (["run"], "paged-jax run needs FILE: see `paged-jax run --help`"),
    (["run", "--fresh"], "paged-jax run needs FILE"),
    (["run", SMOKE, "--frsh"], "unknown flag '--frsh'; did you mean '--fresh'?"),
    (["run", SMOKE, "--output-dir"], "--output-dir needs a value"),
    (["plot"], "paged-jax plot needs RESULTS: see `paged-jax plot --help`"),
    (["plot", "x", "--metric"], "--metric needs a value"),
    (["plot", "x", "--metrics", "y"], "unknown flag '--metrics'; did you mean '--metric'?"),
    (["replay"], "paged-jax replay needs FILE: see `paged-jax replay --help`"),
    (["replay", "x", "--outptu", "y"], "unknown flag '--outptu'; did you mean '--output'?"),
    (["replay", "x", "--output", "y"], "--output without overrides would copy the recording: give key=value, or leave"),
    (["diff"], "paged-jax diff needs A and B: see `paged-jax diff --help`"),
    (["diff", "a"], "paged-jax diff compares two traces, A and B, got 1"),
    (["diff", "a", "b", "c"], "paged-jax diff compares two traces, A and B, got 3"),
    (["buckets"], "paged-jax buckets needs FILE: see `paged-jax buckets --help`"),
    (["models", "x"], "paged-jax models cannot place 'x'"),
    (["fetch"], "paged-jax fetch needs NAME"),
]  # fmt: skip

ERRORS = [
    ([*GENERATE, "--model", "smollm"], "no model 'smollm': "),
    ([*GENERATE, "--model", "./nowhere"], "model './nowhere' does not exist"),
    ([*GENERATE, "--model", "tiny-llama"], "shape only, without weights: use --load-format=dummy"),
    (["run", "nowhere.yaml"], "no experiment file at nowhere.yaml"),
    (["run", SMOKE, "engine.blocksize=8"], "unknown key 'engine.blocksize'; did you mean"),
    (["run", SMOKE, "sweep.engine.block_size=[0]"], "engine.block_size: input should be greater than"),
    (["run", SMOKE, "--fresh", "junk"], "'junk' is not an override: write key=value"),
    (["run", SMOKE, "model=nowhere"], "no model 'nowhere': "),
    (["run", SMOKE, "engine.load_format=auto"], "'tiny-llama' is known by its shape only"),
    (["run", "."], "there is no *.yaml file in .: name an experiment file or a directory of them"),
    (["plot", "nowhere"], "nowhere holds no results, there is no config.yaml: name what `paged-jax run` has written"),
    (["replay", "nowhere.jsonl"], "no trace at nowhere.jsonl: EngineConfig.trace_file records one"),
    (["replay", SMOKE], "smoke.yaml is not a trace of paged-jax: its first line is no header"),
    (["diff", SMOKE, "nowhere.jsonl"], "smoke.yaml is not a trace of paged-jax: its first line is no header"),
    (["bench-scheduler", "max_num_seqs=2"], "max_num_seqs is chosen here so that all requests of a row fit: leave it"),
    (["bench-scheduler", "eviction=5"], "eviction: input should be a valid string, got 5 (in the setting 'default"),
    (["fetch", "smollm2"], "no model 'smollm2' in the catalogue; did you mean 'smollm2-135m'?"),
    (["fetch", "tiny-llama"], "'tiny-llama' is known by its shape only, there is nothing to fetch"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [(a, 2, s) for a, s in USAGE_ERRORS] + [(a, 1, s) for a, s in ERRORS],
    ids=str,
)
def test_errors_are_one_sentence(
    paged_jax: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = paged_jax(*arguments)
    assert sentence in ended.error
    assert ended.err.count("\n") == 1
    assert (ended.status, ended.out) == (status, "")
    assert list(tmp_path.iterdir()) == []


def test_help_of_the_program_names_every_command(paged_jax: Program) -> None:
    ended = paged_jax("--help")
    assert (ended.status, ended.err) == (0, "")
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\S.*\.$", ended.out, re.MULTILINE)
    assert max(map(len, ended.out.splitlines())) <= 110


def test_bench_kernels_is_the_command_of_the_kernels_package(paged_jax: Program) -> None:
    assert re.search(r"^  bench-kernels +\S.*\.$", paged_jax("--help").out, re.MULTILINE)
    ended = paged_jax("bench-kernels", "--help")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("usage: paged-jax bench-kernels [-h] [--implementations A,B]")
    assert "\n  paged-jax bench-kernels --quick" in ended.out
    assert paged_jax("bench-kernels", "--batch", "0").status == 2
    assert "paged-jax bench-kernels: error: " in paged_jax("bench-kernels", "--figure", "nowhere").err


def test_no_command_is_a_usage_error_with_the_help(paged_jax: Program) -> None:
    ended = paged_jax()
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("usage: paged-jax COMMAND")


def test_version(paged_jax: Program) -> None:
    assert paged_jax("--version") == Ended(0, f"paged-jax {__version__}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(paged_jax: Program, name: str) -> None:
    ended = paged_jax(name, "--help")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(f"usage: paged-jax {name} ")
    assert "--debug" in ended.out
    assert f"    paged-jax {name}" in ended.out or name == "models"


def test_help_of_generate_explains_every_engine_setting(paged_jax: Program) -> None:
    out = paged_jax("generate", "--help").out
    # only the text is shown, and nothing is simulated
    for field in set(EngineConfig.model_fields) - {"max_logprobs", *SIMULATED_ONLY}:
        assert f"--{field.replace('_', '-')}" in out
    assert "Tokens per KV block (page). (default: 16)" in out
    assert "{auto,float32,bfloat16,float16}" in out
    assert "together with --num-blocks" in " ".join(out.replace("│", " ").split())
    assert "None" not in out.replace("None:", "")


def test_models_is_an_aligned_table(paged_jax: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path))
    lines = paged_jax("models").out.splitlines()
    starts = [lines[0].index(title) for title in ("NAME", "SHAPE", "SOURCE", "CACHED")]
    rows = {line.split()[0]: line for line in lines[1:]}
    for row in rows.values():
        assert all(row[start] != " " and row[max(start - 1, 0)] in (" ", row[0]) for start in starts)
    assert rows["smollm2-135m"].endswith(" no")
    assert "shape only" in rows["tiny-llama"]


def test_interrupt_is_told_in_the_commands_own_words(do: Callable[..., Ended]) -> None:
    ended = do(raising(KeyboardInterrupt("stopped after 3 of 12 trials")))
    assert ended == Ended(130, "", "paged-jax: stopped after 3 of 12 trials\n")
    assert do(raising(KeyboardInterrupt())).err == "paged-jax: interrupted\n"


def test_sigterm_is_like_an_interrupt(do: Callable[..., Ended]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ended = do(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert ended == Ended(130, "", "paged-jax: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (PermissionError(13, "Permission denied", "/root/x"), "/root/x: Permission denied"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes."),
            "out of memory (Out of memory allocating 5 bytes.): make the KV cache smaller",
        ),
        (MemoryError(), "out of memory: make the KV cache smaller"),
        (KeyError("x"), "internal error, KeyError: 'x'; --debug shows where"),
    ],
)
def test_any_error_is_a_sentence_unless_debugging(do: Callable[..., Ended], error: Exception, sentence: str) -> None:
    ended = do(raising(error))
    assert sentence in ended.error
    assert (ended.status, ended.err.count("\n")) == (1, 1)


def test_debug_shows_tracebacks_before_and_after_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--debug", "run", "x.yaml"], ["run", "x.yaml", "--debug"]):
        with pytest.raises(FileNotFoundError):
            main(arguments)
    with pytest.raises(cli.UsageError):
        main(["generate", "--debug", "--prompt", "a", "--block-size", "0"])
    monkeypatch.setattr(cli.Generate, "__call__", lambda self: print(self.engine.debug))
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--debug", "generate", "--prompt", "a"])


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)


def test_what_does_not_compute_imports_no_jax() -> None:
    script = """
import json, sys
from paged_jax.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit:
        pass
    found = sorted({"jax", "jaxlib", "flax"} & set(sys.modules))
    assert not found, (arguments, found)
"""
    commands = [["--help"], ["generate", "--help"], ["models"], *(arguments for arguments, _ in ERRORS)]
    done = python(script, json.dumps(commands))
    assert done.returncode == 0, done.stderr


def test_process_ends_with_a_status_and_no_traceback() -> None:
    done = python("from paged_jax.cli import main; main()", "run", "nowhere.yaml")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "paged-jax: error: no experiment file at nowhere.yaml; examples are under configs/\n"


def test_any_command_with_overrides_takes_them_after_flags_too(
    paged_jax: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Bake:
        """Bake."""

        needs: ClassVar[str] = ""
        overrides: tyro.conf.Positional[tuple[str, ...]] = ()
        hot: tyro.conf.FlagCreatePairsOff[bool] = False

        def __call__(self) -> None:
            print(self.overrides)

    monkeypatch.setitem(COMMANDS, "bake", Bake)
    assert paged_jax("bake", "a=1", "--hot", "b=2").out == "('a=1', 'b=2')\n"


def test_closed_pipe_is_quiet() -> None:
    # the child waits until nobody reads any more
    script = "import sys; sys.stdin.read(); from paged_jax.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", script, "models"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_replay_what_if_and_diff_need_no_jax(paged_jax: Program, tmp_path: Path) -> None:
    run, sjf = str(tmp_path / "run.jsonl"), str(tmp_path / "sjf.jsonl")
    three(tmp_path / "run.jsonl")
    count = len((tmp_path / "run.jsonl").read_text().splitlines()) - 1
    assert paged_jax("replay", run) == Ended(0, f"{count} events, 12 steps: every decision reproduced\n", "")
    ended = paged_jax("replay", run, "scheduling_policy=sjf", "--output", sjf, "length_predictor=oracle")
    assert (ended.status, ended.err) == (0, "")
    assert "3 requests, replayed with scheduling_policy=sjf, length_predictor=oracle" in ended.out
    ended = paged_jax("diff", run, sjf)
    assert (ended.status, ended.err) == (0, "")
    assert "  scheduling_policy: fcfs | sjf\n" in ended.out
    assert "before the first step" not in ended.out
    assert "step 1, where they part:" in ended.out
    assert "  admitted       A  long (slot 0)\n                 B  short (slot 0)\n" in ended.out
    assert "exists, and is not overwritten" in paged_jax("replay", run, "scheduling_policy=sjf", "--output", sjf).error
    script = """
import sys
from paged_jax.cli import main
for arguments in (["replay", sys.argv[1]], ["replay", sys.argv[1], "eviction=null"], ["diff", *sys.argv[1:]]):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == 0, arguments
    found = sorted({"jax", "jaxlib", "flax", "pandas"} & set(sys.modules))
    assert not found, (arguments, found)
"""
    done = python(script, run, sjf)
    assert done.returncode == 0, done.stderr


def test_a_replay_that_differs_ends_with_status_1(paged_jax: Program, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    three(path)
    text = path.read_text()
    path.write_text(text.replace('"admitted":[["middling",0]]', '"admitted":[["middling",1]]'))
    ended = paged_jax("replay", str(path))
    assert (ended.status, ended.err) == (1, "")
    assert ended.out.startswith(f"line 34 of {path}, step 7: the replay differs from the recording\n  expected  ")


def test_generate_records_what_replay_reproduces(paged_jax: Program, tiny_model: str, tmp_path: Path) -> None:
    """A real model on the wall's clock, with text that ends at a stop string."""
    path = tmp_path / "run.jsonl"
    command = ["generate", "--model", tiny_model, *ENGINE, "--prompt", "hello", "--max-tokens", "12"]
    whole = paged_jax(*command).out.removesuffix("\n")
    ended = paged_jax(*command, "--stop", whole[3:6], "--trace-file", str(path))
    assert ended.status == 0, ended.err
    assert ended.out == whole[: whole.index(whole[3:6])] + "\n"
    assert json.loads(path.read_text().splitlines()[-1])["stop"] == whole[3:6]
    assert "every decision reproduced" in paged_jax("replay", str(path)).out
    assert "exists, and is not overwritten" in paged_jax(*command, "--trace-file", str(path)).error


def test_a_prompt_arrives_when_all_is_compiled(
    paged_jax: Program, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a trace that waits for compilation, policies would seem to save a minute."""
    from paged_jax.execution.jax_executor import JaxExecutor

    warm_up, seconds = JaxExecutor.warm_up, []

    def noted(self: JaxExecutor, *arguments: object, **keywords: object) -> None:
        began = time.perf_counter()
        warm_up(self, *arguments, **keywords)
        seconds.append(time.perf_counter() - began)

    monkeypatch.setattr(JaxExecutor, "warm_up", noted)
    path = tmp_path / "run.jsonl"
    command = ["generate", "--model", tiny_model, *ENGINE, "--prompt", "hello", "--max-tokens", "2"]
    assert paged_jax(*command, "--trace-file", str(path)).status == 0
    events = [json.loads(line) for line in path.read_text().splitlines()]
    (arrival,) = (event for event in events if event["event"] == "arrival")
    assert arrival["t"] >= seconds[0], "the engine's clock runs from before the compilation"
    assert events[0]["config"]["max_logprobs"] == 0


def test_run_writes_results_and_prints_the_tables(paged_jax: Program, tmp_path: Path) -> None:
    smaller = ["sweep.engine.block_size=[16]", "engine.max_num_batched_tokens=8", "engine.token_buckets=[8]"]
    shorter = ["seeds=[0]", "repeats=1", "workload.num_requests=2", "report.figures={}"]
    command = ["run", SMOKE, *smaller, "--output-dir", str(tmp_path / "out"), *shorter]
    ended = paged_jax(*command)
    assert ended.status == 0, ended.err
    assert "output throughput" in ended.out
    assert "1 trial run" in ended.out
    assert len((tmp_path / "out" / "trials.jsonl").read_text().splitlines()) == 1
    assert "complete already, nothing to run" in paged_jax(*command).out


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a shape, a tokenizer of single bytes and a chat template, for dummy weights."""
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.Tokenizer(BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(folder)


ENGINE = ["--load-format", "dummy", "--max-num-seqs", "1", "--num-blocks", "8"]


def test_generate_streams_the_text_alone_to_stdout(
    paged_jax: Program, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from io import StringIO

    from paged_jax import LLM, SamplingParams

    command = ["generate", "--model", tiny_model, *ENGINE, "--max-tokens", "12"]
    command += ["--max-num-batched-tokens", "16", "--token-buckets", "1", "8", "16"]
    monkeypatch.setattr(sys, "stdin", StringIO("hi there\n"))
    ended = paged_jax(*command, "--prompt", "-", "--chat", "--stats")
    assert ended.status == 0, ended.err
    llm = LLM(
        tiny_model, load_format="dummy", num_blocks=8, max_num_seqs=1, max_num_batched_tokens=8, token_buckets=[8]
    )
    (expected,) = llm.generate("u:hi there;", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert ended.out == expected.outputs[0].text + "\n"
    assert "11 prompt tokens, 12 output tokens (length) in " in ended.err
    assert "before that, 2 programs compiled in " in ended.err, "more or less than a chunk of 11 and single tokens"
    assert "compiling" in ended.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "x" * 64], "the prompt has 64 tokens and --max-model-len is 64"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--stop-token-ids", "999"], "--stop-token-ids holds 999"),
        (["--prompt", "a", "--max-model-len", "999"], "--max-model-len (999) is more than the 64 tokens"),
        (["--prompt", "a", "--eviction", "no.such:Class"], "'no.such:Class' cannot be loaded"),
    ],
)
def test_what_only_the_model_can_refuse_is_refused_before_compiling(
    paged_jax: Program, tiny_model: str, arguments: list[str], sentence: str
) -> None:
    ended = paged_jax("generate", "--model", tiny_model, *ENGINE, *arguments)
    assert sentence in ended.error
    assert (ended.status, ended.out) == (1, "")
    assert "compiling" not in ended.err
