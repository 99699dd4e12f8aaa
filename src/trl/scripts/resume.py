"""Finding the checkpoint from which a run goes on."""

import re
from pathlib import Path


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The complete checkpoint with the highest step in `output_dir`, or None.

    Checkpoints are `checkpoint-<step>` directories; one without the trainer's state was not finished.
    """
    folder = Path(output_dir)
    if not folder.is_dir():
        return None
    found = {}
    for entry in folder.iterdir():
        match = re.fullmatch(r"checkpoint-(\d+)", entry.name)
        if match and (entry / "trainer_state.json").is_file():
            found[int(match.group(1))] = entry
    return found[max(found)] if found else None


def checkpoint_to_resume(resume_from_checkpoint: str | bool | None, output_dir: str | Path) -> str | None:
    """The directory that `--resume_from_checkpoint` means: a path as it is, `true` the newest in `output_dir`.

    None means a fresh start: nothing was asked for, or (said in a printed note) there is no checkpoint yet.

    Raises:
        FileNotFoundError: if a path is given that is not a directory.
    """
    wanted = str(resume_from_checkpoint).strip()
    if resume_from_checkpoint is None or wanted.lower() in ("", "false", "no", "none"):
        return None
    if wanted.lower() not in ("true", "yes"):
        if not Path(wanted).is_dir():
            raise FileNotFoundError(
                f"resume_from_checkpoint must be true or the directory of a checkpoint, got {wanted!r}, which does not "
                "exist. Use true for the newest one in output_dir."
            )
        return wanted
    newest = latest_checkpoint(output_dir)
    if newest is None:
        print(f"No complete checkpoint in {output_dir}: starting from the beginning.")
    return None if newest is None else str(newest)
