"""The notebook runs from top to bottom on the smoke experiment, and says what it should."""

import asyncio
import os
import re
import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "block_sizes.ipynb"


def read_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    return notebook


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def stream(notebook, name):
    return "".join(o.text for o in outputs_of(notebook) if o.output_type == "stream" and o.name == name)


def execute(notebook, scratch):
    """Run it in a process of its own, with nothing read from or written to the user's Jupyter settings."""
    environment = {
        **os.environ,
        "IPYTHONDIR": str(scratch / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PAGED_JAX_NOTEBOOK_CONFIG": "configs/smoke.yaml",
        "PAGED_JAX_NOTEBOOK_RESULTS": str(scratch / "results"),
    }
    # without the registered kernels, what remains is ipykernel's own, under the Python that runs this test
    manager = AsyncKernelManager(
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), connection_file=str(scratch / "kernel.json")
    )
    assert manager.kernel_spec.argv[0] == sys.executable
    resources = {"metadata": {"path": NOTEBOOK.parent}}
    client = NotebookClient(notebook, km=manager, timeout=300, resources=resources)
    asyncio.run(client.async_execute(env=environment, cleanup_kc=True))


def test_the_notebook_runs_and_tells_its_story(tmp_path):
    notebook = read_without_outputs()
    execute(notebook, tmp_path)
    text = stream(notebook, "stdout")

    # the experiment has no results, so the notebook runs it
    assert "There are no results of 'smoke' yet" in text
    assert "12 trials of tiny-llama with 8 requests each" in text
    assert "All settings generated identical tokens on each of the 2 workloads." in text
    assert re.search(r"^output throughput, best: block_size=\d+ with [\d.]+ ± [\d.]+ tokens/s", text, re.M)
    assert "internal fragmentation, best: block_size=4 " in text
    assert "internal fragmentation, worst: block_size=64 " in text
    assert sum("image/png" in output.get("data", ()) for output in outputs_of(notebook)) == 5

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

    # a progress bar is all that goes to standard error
    complaints = [line for line in re.split(r"[\r\n]+", stream(notebook, "stderr")) if "%|" not in line]
    assert not "".join(complaints).strip()


def test_the_file_is_small_and_its_outputs_name_no_machine_path():
    assert NOTEBOOK.stat().st_size < 1_000_000
    for output in outputs_of(nbformat.read(NOTEBOOK, as_version=4)):
        assert output.output_type != "error"
        data = output.get("data", {})
        words = [output.get("text", ""), *(v for k, v in data.items() if k.startswith("text/"))]
        assert not re.search(r"(?<![\w./<])/\w+/\w", "\n".join(words))
        assert str(ROOT) not in "\n".join(words)
