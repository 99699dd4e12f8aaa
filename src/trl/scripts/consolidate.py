"""`trl consolidate CHECKPOINT --out DIR`: the weights that several processes wrote in parts become a model."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl.scripts.plain_parser import PlainParser


def make_parser() -> PlainParser:
    parser = PlainParser(prog="trl consolidate", description="Save the sharded weights of a checkpoint as a model.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of FSDP2 with SHARDED_STATE_DICT")
    parser.add_argument("--out", "--output", metavar="DIR", help="new folder for the model (default: CHECKPOINT-model)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return make_parser().run(lambda options: consolidate(Path(options.checkpoint), options.out), argv)


def consolidate(checkpoint: Path, out: str | None) -> None:
    """Save the weights of a sharded checkpoint as they train, with its config and tokenizer, in `out`.

    Memory holds them once. Raises: ValueError, FileNotFoundError.
    """
    from trl.checkpoints.wholeness import PARTS, SHARDED_WEIGHTS, faults, listed
    from trl.scripts.running import require_new_folder

    index, out = f"{SHARDED_WEIGHTS}/.metadata", out or f"{checkpoint}-model"
    if not (checkpoint / SHARDED_WEIGHTS).is_dir():
        expected = "expected a checkpoint of FSDP2 with SHARDED_STATE_DICT"
        raise ValueError(f"'{checkpoint}' has no {SHARDED_WEIGHTS}, {expected}.")
    needed = {name: (name,) for name in ("trainer_state.json", index)}
    if reasons := faults(checkpoint, without=list(PARTS), needed=needed):
        raise ValueError(f"'{checkpoint}' is not whole: {listed(reasons)}. Take another checkpoint.")
    require_new_folder(out)
    import torch
    from transformers import AutoConfig, GenerationConfig

    from trl.models.loading import architecture_of, load_processing_class

    processing_class = load_processing_class(str(checkpoint))
    architecture = architecture_of(str(checkpoint), {})
    with torch.device("meta"):
        model = getattr(architecture, "from_config", architecture)(AutoConfig.from_pretrained(checkpoint))
    unexpected = model.load_state_dict(_sharded_weights(checkpoint / SHARDED_WEIGHTS), strict=False, assign=True)[1]
    model.tie_weights()
    missing = [name for name, weight in model.state_dict().items() if weight.is_meta]
    if names := [*missing, *unexpected]:
        raise ValueError(
            f"'{checkpoint}' has other weights than {type(model).__name__} ({len(missing)} missing, {len(unexpected)} "
            f"unexpected: {names[0]}, ...). Adapters and models with a value head are not consolidated."
        )
    if (checkpoint / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    model.save_pretrained(out)
    processing_class.save_pretrained(out)
    print(f"Model saved in {out}")


def _sharded_weights(folder: Path) -> dict[str, Any]:
    """The tensors that `torch.distributed.checkpoint` wrote into a folder, by their names in the model."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader, state = dcp.FileSystemReader(folder), {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}
