"""Whether what a run will write can be written: found out before anything is loaded."""

import os
from pathlib import Path
from typing import Any


def check_output_dir(output_dir: str | Path) -> None:
    """Check that `output_dir` is a folder that can be written to, or can become one.

    Raises: ValueError where it, or what it shall lie in, is a file or read-only.
    """
    folder = Path(output_dir)
    file = next((place for place in (folder, *folder.parents) if place.is_file()), None)
    if file is not None:
        raise ValueError(
            f"output_dir must be a folder, new or not, got '{output_dir}', and '{file}' is a file. Name another place."
        )
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"output_dir must be a folder that can be written to, got '{output_dir}', and '{there}' is read-only. Name "
            "another place."
        )


def check_push(args: Any) -> None:
    """Check that a run with `push_to_hub` has a token, and a Hub that may be asked.

    Raises: ValueError where it has not.
    """
    if not args.push_to_hub:
        return
    from huggingface_hub import constants, get_token

    way_out = (
        "Or train without push_to_hub, and upload the folder afterwards (`hf upload <name> <output_dir>`)."
    )
    if constants.is_offline_mode():
        raise ValueError(
            f"push_to_hub needs the Hub, and HF_HUB_OFFLINE forbids to ask it. Unset that variable. {way_out}"
        )
    if not (args.hub_token or get_token()):
        raise ValueError(
            "push_to_hub needs a token for the Hub, and there is none. Log in with `hf auth login`, or set HF_TOKEN or "
            f"hub_token. {way_out}"
        )
