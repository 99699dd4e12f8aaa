"""Small checkpoints with every part, written without training."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from trl.checkpoints.wholeness import MANIFEST, publish


def forget_sums(checkpoint: Path) -> None:
    """Make the manifest one of an older checkpoint, which lists files without their checksums."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"] = list(manifest["files"])
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def make_checkpoint(folder: Path, step: int, **facts) -> Path:
    """`folder/checkpoint-<step>`; with `facts` it has a manifest, too."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"weight": torch.ones(3)}, path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.ones(3)}, path / name)
    for name in ("config.json", "trainer_state.json", "progress_0.json"):
        (path / name).write_text('{"known": 1}')
    if facts:
        publish(path.rename(folder / "_written"), path, facts, replaced=folder / "_replaced")
    return path
