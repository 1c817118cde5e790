"""The claims of configs/claims: every file is there and runs, sizes are those computed by hand, and docs/claims.md says
what the experiments find."""

import re
from pathlib import Path

import pytest

from paged_jax.experiments.config import load_experiment
from paged_jax.experiments.published import Comparison, compare
from paged_jax.experiments.run_directory import load_directory, run_directory
from paged_jax.experiments.runner import run_experiment
from paged_jax.experiments.summary import summarise
from paged_jax.experiments.trials import TrialLog
from paged_jax.simulation.hardware import load_hardware

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "configs" / "claims"
FILES = sorted(path.name for path in CLAIMS.glob("*.yaml"))
SIMULATED = [name for name in FILES if not name.endswith("_real.yaml")]
REAL = [name for name in FILES if name.endswith("_real.yaml")]
ARITHMETIC = ("01_", "11_", "14_", "16_")
VERDICTS = {"holds", "holds in part", "does not hold"}

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the files count from there."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory):
    """Measured rows of the claims that are arithmetic, by file and name; each runs once."""
    found: dict[str, dict[str, float]] = {}

    def of(file: str) -> dict[str, float]:
        if file not in found:
            comparison = run(file, tmp_path_factory.mktemp("claims"), "workload.num_requests=8")
            found[file] = {row.row.name: row.ours.low for row in comparison.rows}
        return found[file]

    return of


def run(file: str, directory: Path, *overrides: str) -> Comparison:
    config = load_experiment(CLAIMS / file, overrides)
    run_experiment(config, directory / config.name, progress=False)
    records = list(TrialLog(directory / config.name).read().values())
    comparison = compare(config, summarise(config, records))
    assert comparison is not None
    return comparison


def few_requests(file: str) -> list[str]:
    """Overrides with which a file is quick; its numbers then mean nothing."""
    config = load_experiment(CLAIMS / file)
    if config.workload.kind == "trace":
        # the stand-in too, which must not have fewer than are taken
        return ["workload.max_requests=4", "workload.stand_in.num_requests=4", "seeds=[0]"]
    swept = {key for axis in config.sweep.get("zip", ()) for key in axis}
    if "workload.num_requests" in swept:
        short = [] if "workload.output.max" in swept else ["workload.output.max=8", "workload.output.mean=4"]
        return ["seeds=[0]", *short]
    return ["workload.num_requests=4", "seeds=[0]"]


def test_there_is_a_file_for_each_of_the_18_claims() -> None:
    assert {int(name[:2]) for name in FILES} == set(range(1, 19))
    assert len(SIMULATED) == 18
    assert {int(name[:2]) for name in REAL} == {13, 17}


@pytest.mark.parametrize("file", FILES)
def test_every_claim_has_a_statement_and_rows_that_are_judged(file: str) -> None:
    config = load_experiment(CLAIMS / file)
    assert config.published is not None
    assert config.published.statement
    assert any(not row.informative for row in config.published.rows)
    assert config.executor == ("jax" if file in REAL else "simulated")
    head = (CLAIMS / file).read_text(encoding="utf-8").partition("name:")[0]
    assert "real" in head if file in REAL else "imulated" in head, "the comment says how the claim is measured"
    assert config.name == f"claim-{file.removesuffix('.yaml').replace('_', '-')}"


def test_the_claims_can_run_together() -> None:
    assert len(load_directory(CLAIMS)) == len(FILES)


@pytest.mark.parametrize("file", [name for name in SIMULATED if name.startswith(("05", "12", "13"))])
def test_a_few_requests_give_a_verdict(file: str, tmp_path: Path) -> None:
    assert run(file, tmp_path, *few_requests(file)).verdict in VERDICTS


@pytest.mark.slow
@pytest.mark.parametrize("file", [name for name in SIMULATED if not name.startswith(("05", "12", "13", *ARITHMETIC))])
def test_a_few_requests_of_the_others_give_a_verdict(file: str, tmp_path: Path) -> None:
    assert run(file, tmp_path, *few_requests(file)).verdict in {*VERDICTS, "undecided"}


@pytest.mark.parametrize("name", ["a100-40gb-pcie3", "a100-40gb-c2c"])
def test_hardware_of_claim_7_differs_in_its_link_only(name: str) -> None:
    changed = load_hardware(str(CLAIMS / "hardware" / f"{name}.yaml")).model_dump()
    catalogued = load_hardware("a100-40gb").model_dump()
    assert {key for key in changed if changed[key] != catalogued[key]} == {"name", "host_link_bandwidth"}


def test_bytes_of_a_token(sizes) -> None:
    ours = sizes("01_kv_bytes_per_token.yaml")
    assert ours["Llama-2-7B (2 x 32 x 32 x 128 x 2)"] == 512 * KIB
    assert 16 * ours["Llama-2-7B, blocks of 16 in 1 GiB"] * 512 * KIB == GIB == 2048 * 512 * KIB
    assert ours["OPT-13B (2 x 40 x 40 x 128 x 2)"] == 800 * KIB
    assert ours["Llama-3-8B (2 x 32 x 8 x 128 x 2)"] == 128 * KIB


def test_bytes_of_a_block(sizes) -> None:
    ours = sizes("14_block_bytes.yaml")
    assert ours["Llama-2-7B, 16 tokens, all layers"] == 8 * MIB
    assert ours["Llama-2-7B, 16 tokens, one layer"] == 256 * KIB
    assert ours["Llama-2-7B, 1 token, one layer"] == 16 * KIB


def test_latent_attention_stores_a_57th(sizes) -> None:
    """512 + 64 numbers a layer against keys and values of 128 heads of 128."""
    ours = sizes("11_latent_attention.yaml")
    assert ours["DeepSeek-V2, latent : 128 heads"] == pytest.approx(576 / (2 * 128 * 128), rel=1e-12)
    # devices share the heads, and each has the latents: an eighth of the advantage is left to eight of them
    four, eight = ours["blocks in the same memory, 4 devices"], ours["blocks in the same memory, 8 devices"]
    assert four == pytest.approx(2 * 128 * 128 / 576 / 4, rel=0.01)
    assert eight == pytest.approx(2 * 128 * 128 / 576 / 8, rel=0.01)


def test_checkpoints_of_hidden_states(sizes) -> None:
    """Llama-2-7B: 32 layers of 4096 numbers; keys and values are 2 of 4 squares beside an MLP of 3 x 4096 x 11008."""
    ours = sizes("16_hidden_state_checkpoint.yaml")
    assert ours["Llama-2-7B, inputs of all layers, a token : a block"] == 32 * 4096 * 2 / (8 * MIB)
    assert ours["Llama-2-7B, inputs of all layers : keys and values"] == 0.5
    assert ours["Llama-3-8B, inputs of all layers : keys and values"] == 2.0
    assert 2048 * ours["Llama-2-7B, last hidden state, a token : a block"] == 2.0
    share = 2 * 4096**2 / (4 * 4096**2 + 3 * 4096 * 11008)
    assert ours["products that restoring computes again, Llama-2-7B"] == pytest.approx(share, rel=1e-12)


@pytest.mark.slow
def test_the_documentation_says_what_is_found(tmp_path: Path) -> None:
    """All claims as they stand, the real ones left out, whose verdict is that of a machine: about four minutes."""
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    written = {int(n): verdict for n, verdict in re.findall(r"^\| (\d+)\. .*?\*\*(.*?)\*\*", text, flags=re.MULTILINE)}
    assert set(written) == set(range(1, 19))
    outcomes = run_directory({CLAIMS / f: load_experiment(CLAIMS / f) for f in SIMULATED}, tmp_path, progress=False)
    found = {}
    for outcome in outcomes:
        assert outcome.error is None, f"{outcome.path}: {outcome.error}"
        assert outcome.comparison is not None
        found[int(outcome.path.name[:2])] = outcome.comparison.verdict
    assert found == written
