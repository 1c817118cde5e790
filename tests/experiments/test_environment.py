import subprocess

import pytest

from paged_jax.experiments.environment import diff_sha256, git_state, read_runs


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_uncommitted_changes_have_a_fingerprint(checkout):
    assert diff_sha256(checkout) is None
    (checkout / "notes.txt").write_text("not code")
    assert diff_sha256(checkout) is None
    seen = set()
    for name, text in [
        ("code.py", "x = 2\n"),
        ("code.py", "x = 3\n"),
        ("new é.py", "y = 1\n"),
        ("new é.py", "y = 2\n"),
    ]:
        (checkout / name).write_text(text)
        assert diff_sha256(checkout) == diff_sha256(checkout)
        seen.add(diff_sha256(checkout))
    assert len(seen) == 4
    assert None not in seen


def test_the_state_names_commit_and_changes():
    assert set(git_state()) == {"git_commit", "git_changes", "git_diff"}


@pytest.mark.parametrize("text", ['{"runs": [', "[]", '{"runs": 3}', '{"runs": [1]}', "{}", ""])
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "environment.json"
    assert read_runs(tmp_path) == []
    path.write_text(text)
    with pytest.raises(ValueError, match=r"environment\.json is damaged: restore it, or start over with --fresh"):
        read_runs(tmp_path)
