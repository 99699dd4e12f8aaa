"""Checks of a training command before anything is loaded: output folder, Hub, checkpoint, processes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl.checkpoints.wholeness import checkpoint_to_load, checkpoints_in


def check_output_dir(output_dir: str | Path) -> None:
    """Check that `output_dir` is a folder that can be written to, or can become one.

    Raises: ValueError where it, or what it shall lie in, is a file or read-only.
    """
    folder = Path(output_dir)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    wrong = None if os.access(there, os.W_OK | os.X_OK) else "read-only"
    if wrong := wrong if there.is_dir() else "a file":
        raise ValueError(
            f"output_dir must be a folder that can be written to, or a new one, got '{output_dir}', and '{there}' is {wrong}. "
            "Name another place."
        )


def check_push(args: Any) -> None:
    """Check that a run with `push_to_hub` has a token, and a Hub that may be asked.

    Raises: ValueError where it has not.
    """
    if not args.push_to_hub:
        return
    from huggingface_hub import constants, get_token

    wrong = None
    if constants.is_offline_mode():
        wrong = "the Hub, and HF_HUB_OFFLINE forbids to ask it. Unset that variable."
    elif not (args.hub_token or get_token()):
        wrong = "a token, and there is none. Log in with `hf auth login`, or set HF_TOKEN or hub_token."
    if wrong:
        raise ValueError(f"push_to_hub needs {wrong} Or upload the folder afterwards with `hf upload`.")


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


def check_processes(args: Any) -> None:
    """Check that the distributed state of a training config is what its launcher promised in the environment.

    accelerate (1.15) does not refuse what it cannot do without an accelerator: processes on a CPU that it was not told
    to connect train one model each, into the same directory, and sharding that it cannot do becomes plain data
    parallelism.

    Raises:
        ValueError: if processes are not connected, or the sharding that was asked for is not in use.
    """
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if args.world_size != started:
        raise ValueError(
            f"{started} processes were started but are not connected: each would train a model of its own. On a CPU "
            "use --accelerate_config cpu (or set ACCELERATE_USE_CPU=true); elsewhere check that every process sees an "
            "accelerator."
        )
    state = args.distributed_state
    kind = getattr(getattr(state, "distributed_type", None), "value", "NO")
    for variable, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes") and kind == "MULTI_CPU":
            raise ValueError(
                f"{name} was asked for, but accelerate does not shard over CPU processes: it would train with plain "
                "data parallelism instead. Use --accelerate_config cpu for that."
            )
