import subprocess

from trl.scripts.env import get_git_commit_hash


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_only_files_under_git_have_a_commit(tmp_path, monkeypatch):
    for name in ("tracked_package", "untracked_package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "tracked_package")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.syspath_prepend(tmp_path)
    commit = get_git_commit_hash("tracked_package")
    assert commit is not None and len(commit) == 40
    assert get_git_commit_hash("untracked_package") is None
    assert get_git_commit_hash("no_such_package_at_all") is None
