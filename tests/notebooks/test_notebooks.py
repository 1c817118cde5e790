"""The notebooks run from top to bottom, say what they should, and keep the outputs of such a run."""

import ast
import asyncio
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def read(name):
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def stream(notebook, name="stdout"):
    return "".join(o.text for o in outputs_of(notebook) if o.output_type == "stream" and o.name == name)


def num_pictures(notebook):
    return sum("image/png" in output.get("data", ()) for output in outputs_of(notebook))


def texts_of(output):
    data = output.get("data", {})
    return [output.get("text", ""), *(v for k, v in data.items() if k.startswith("text/"))]


def says_something(source):
    """Whether a cell ends with an expression, which is shown or prints, or prints on the way there."""
    body = ast.parse(source.replace("%matplotlib inline", "")).body
    outside = [node for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    calls = [node.func for part in outside for node in ast.walk(part) if isinstance(node, ast.Call)]
    return isinstance(body[-1], ast.Expr) or any(isinstance(f, ast.Name) and f.id == "print" for f in calls)


def execute(name, scratch, **variables):
    """Run it in a process of its own, with nothing read from or written to the user's Jupyter settings.

    Whatever is kept in the file is thrown away first. An error in a cell is an error here; nothing may be said on
    standard error but the progress of bars.
    """
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    environment = {
        **os.environ,
        "IPYTHONDIR": str(scratch / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **variables,
    }
    # without the registered kernels, what remains is ipykernel's own, under the Python that runs this test
    manager = AsyncKernelManager(
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), connection_file=str(scratch / "kernel.json")
    )
    assert manager.kernel_spec.argv[0] == sys.executable
    resources = {"metadata": {"path": ROOT / "notebooks"}}
    client = NotebookClient(notebook, km=manager, timeout=300, resources=resources)
    asyncio.run(client.async_execute(env=environment, cleanup_kc=True))
    complaints = [line for line in re.split(r"[\r\n]+", stream(notebook, "stderr")) if "%|" not in line]
    assert not "".join(complaints).strip()
    assert num_pictures(notebook) == num_pictures(read(name))
    return notebook


def test_block_sizes(tmp_path):
    notebook = execute(
        "block_sizes",
        tmp_path,
        PAGED_JAX_NOTEBOOK_CONFIG="configs/smoke.yaml",
        PAGED_JAX_NOTEBOOK_RESULTS=str(tmp_path / "results"),
        PAGED_JAX_NOTEBOOK_STUDY="workload.num_requests=24 sweep.engine.block_size=[1,64]",
    )
    text = stream(notebook)

    # the experiment has no results, so the notebook runs it
    assert "There are no results of 'smoke' yet" in text
    assert "12 trials of tiny-llama with 8 requests each" in text
    assert "All settings generated identical tokens on each of the 2 workloads." in text
    assert re.search(r"^output throughput, best: block_size=\d+ with [\d.]+ ± [\d.]+ tokens/s", text, re.M)
    assert "internal fragmentation, best: block_size=4 " in text
    assert "internal fragmentation, worst: block_size=64 " in text

    # inside the engine: 40 common tokens are ten blocks of 4, or two of 16 and 8 tokens that nobody finds
    assert "same tokens with both block sizes: True" in text
    tables = re.findall(r"block table of [XY]: \[(.*)\]", text)
    x4, y4, x16, y16 = ([int(block) for block in table.split(", ")] for table in tables)
    assert x4[:10] == y4[:10]
    assert x16[:2] == y16[:2]
    assert not set(x4[10:]) & set(y4[10:])
    assert not set(x16[2:]) & set(y16[2:])
    assert "Y took 40 of its 40 common tokens" in text
    assert "Y took 32 of its 40 common tokens" in text

    # X has 45 prompt tokens and Y 49, and 11 of their 12 output tokens were fed back; whole blocks are kept
    assert "X: 56 of 56 tokens are kept" in text
    assert "Y: 60 of 60 tokens are kept" in text
    assert "X: 48 of 56 tokens are kept" in text
    assert "Y: 48 of 60 tokens are kept" in text
    # the last token of a prompt is always computed, so 44 of X's 45 at most
    assert "X's prompt once more: 44 of its 45 tokens" in text
    assert "X's prompt once more: 32 of its 45 tokens" in text

    # the study: a line for each model
    for model in "llama-2-7b", "llama-3-8b", "deepseek-v2":
        assert re.search(rf"^ *{model} +\S+ +\d +(1|64) ", text, re.M)


def test_paging(tmp_path):
    """Nothing in it takes time, not even virtual time: what is kept must be what comes out."""
    text = stream(execute("paging", tmp_path))
    assert text == stream(read("paging"))
    # 2 * 32 layers * 32 heads * 128 * 2 bytes
    assert "llama-2-7b     512 KiB a token, 1.00 GiB for 2,048 tokens" in text
    assert "the same: True" in text
    # A has three blocks, of which B and its second sample share the first; they have one more each
    assert "7 entries of block tables, 5 blocks in use" in text


def test_batching(tmp_path):
    text = stream(execute("batching", tmp_path))
    ended = {name: float(s) for name, s in re.findall(r"^(\w+) *: done after ([\d.]+) s", text, re.M)}
    assert ended["static"] > 1.5 * ended["continuous"]
    assert re.search(r"^static .* idle \d\d %$", text, re.M)
    assert not re.search(r"^continuous .* idle", text, re.M)
    gains = [float(gain) for gain in re.findall(r"continuous batching generates ([\d.]+) times", text)]
    assert gains == sorted(gains)
    assert 0.95 < gains[0] < 1.05
    assert gains[-1] > 2


def test_preemption(tmp_path):
    text = stream(execute("preemption", tmp_path))
    # 67 blocks are those of two prompts and three more: with 17 output tokens each, A and B want two more each
    assert re.search(r"^recompute\n.*\n.*\n.* B gives way: recompute\n.* B: tokens 0 to 529 are computed", text, re.M)
    assert re.search(r"B gives way: swap\n.* B: 33 blocks move to the host\n.* B: 33 blocks move to the device", text)
    (small, *_, large) = re.findall(r"blocks of +(\d+): swapping is cheaper (from (\d+) tokens on|never)", text)[:4]
    assert small == ("1", "never", "")
    assert large[0] == "64"
    assert int(large[2]) < 1024


def test_your_own_policy(tmp_path):
    notebook = execute("your_own_policy", tmp_path)
    text = stream(notebook)
    assert "ValueError: scheduling_policy '__main__:Missing' cannot be loaded" in text
    assert "must be derived from paged_jax.engine.policies.QueuePolicy" in text
    assert "lacks the methods __iter__, __len__, peek, remove, requeue of QueuePolicy" in text
    assert "RuntimeError: victim policy Stranger chose None" in text
    # latency and longest wait of three queues: ours is between the other two in both
    tables = [o.data["text/html"] for o in outputs_of(notebook) if "text/html" in o.get("data", ())]
    rows = re.findall(r"<th>(\S+)</th>\s*<td>([\d.]+)</td>\s*<td>([\d.]+)</td>", tables[0])
    latency, wait = ({name: float(row[i]) for name, *row in rows} for i in (0, 1))
    ours = "__main__:HighestResponseRatio"
    assert latency["sjf"] < latency[ours] < latency["fcfs"]
    assert wait["fcfs"] < wait[ours] < wait["sjf"]


@pytest.mark.slow
def test_prefix_caches(tmp_path):
    text = stream(execute("prefix_caches", tmp_path))
    # two blocks of three tokens are the common beginning; a conversation finds all its whole blocks
    assert "'hi why'        :  6 of  8 prompt tokens were in the cache" in text
    kept = dict(re.findall(r"^(\w+ +with \w+): (\d+) of 15 prompt tokens", text, re.M))
    assert kept["radix with lru"] == kept["hash  with lru"] != "0"
    assert kept["hash  with fifo"] == "0"
    for cache in "hash", "radix":
        assert all(float(rate) > 0.5 for rate in re.findall(rf"^{cache} +([\d.]+)", text, re.M))


@pytest.mark.slow
def test_paper(tmp_path):
    notebook = execute("paper", tmp_path)
    tables = [o.data["text/markdown"] for o in outputs_of(notebook) if "text/markdown" in o.get("data", ())]
    assert tables
    assert all(re.search(r"^\| .* paper \| +ours \| +difference \|$", table, re.M) for table in tables)
    for name in "fig02_kv_memory", "fig12_opt13b_sharegpt", "fig15_alpaca_beam", "fig18b_alpaca", "fig19_swap":
        assert name in tables[-1]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_file_is_small_was_run_as_a_whole_and_names_no_machine_path(name):
    notebook = read(name)
    assert NOTEBOOKS[name].stat().st_size < 1_000_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert num_pictures(notebook) >= 1
    for cell in code[1:]:  # the first one imports
        assert cell.outputs or not says_something(cell.source), cell.source
    for output in outputs_of(notebook):
        assert output.output_type != "error"
        words = "\n".join(texts_of(output))
        assert not re.search(r"(?<![\w./<])/\w+/\w", words)
        assert str(ROOT) not in words
