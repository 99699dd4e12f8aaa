"""The commit of an installed package."""

import importlib.util
import subprocess
from pathlib import Path


def get_git_commit_hash(package_name: str) -> str | None:
    """Hash of the commit that a package runs from, or None if its files are not under Git (or it is not there)."""
    spec = importlib.util.find_spec(package_name)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None  # installed into an environment that happens to lie inside a checkout
    return _git(file.parent, "rev-parse", "HEAD")


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command in `folder`, or None if it fails or there is no git."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
