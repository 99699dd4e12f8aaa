"""The checkpoint from which a command resumes."""

from collections.abc import Sequence
from pathlib import Path

from trl.checkpoints.wholeness import checkpoint_to_load, checkpoints_in


def checkpoint_to_resume(
    resume_from_checkpoint: str | bool | None, output_dir: str | Path, *, without: Sequence[str] = ()
) -> str | None:
    """The directory that `--resume_from_checkpoint` means: a path as it is, `true` the newest whole one in `output_dir`.

    None means a fresh start: nothing was asked for, or (said in a printed note) there is no checkpoint yet.

    Raises:
        FileNotFoundError: if a path is given that is not a directory.
        CheckpointError: if the checkpoint, or every one in `output_dir`, lost a part; `without` may be missing.
    """
    wanted = str(resume_from_checkpoint).strip()
    if resume_from_checkpoint is None or wanted.lower() in ("", "false", "no", "none"):
        return None
    newest = wanted.lower() in ("true", "yes")
    if newest and not checkpoints_in(output_dir):
        print(f"No complete checkpoint in {output_dir}: starting from the beginning.")
        return None
    return str(checkpoint_to_load(True if newest else wanted, output_dir, without=without))
