"""`trl merge ADAPTER --out DIR`: a base model and a PEFT adapter become one model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl.scripts.plain_parser import PlainParser


def make_parser() -> PlainParser:
    parser = PlainParser(prog="trl merge", description="Add an adapter to its base model and save the result.")
    parser.add_argument("adapter", metavar="ADAPTER", help="folder of a PEFT adapter that names its base")
    parser.add_argument("--out", metavar="DIR", required=True, help="new folder for the merged model and its tokenizer")
    parser.add_argument("--base", metavar="MODEL", help="base model, where it is no longer where the adapter names it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return make_parser().run(lambda options: merge(options.adapter, options.out, options.base), argv)


def merge(adapter: str, out: str, base: str | None = None) -> None:
    """Save the base model of an adapter, in its own dtype and with the adapter added, and the tokenizer, in `out`.

    `base`: where the base lies now (None: as the adapter says). Raises: ValueError, FileNotFoundError.
    """
    if not (Path(adapter) / "adapter_config.json").is_file():
        raise ValueError(f"'{adapter}' has no adapter_config.json, expected the folder of a saved adapter.")
    from trl.scripts.running import require_new_folder

    require_new_folder(out)
    from peft import PeftConfig

    from trl.models.loading import load_adapter, load_processing_class
    from trl.models.peft import merged_base
    from trl.models.setup import REWARD_MODEL, STEP_CLASSIFIER

    config = PeftConfig.from_pretrained(adapter)
    kinds = {kind.task_type: kind for kind in (REWARD_MODEL, STEP_CLASSIFIER)}
    kind = kinds.get(str(getattr(config.task_type, "value", config.task_type)))
    labels: dict[str, Any] = {"num_labels": kind.labels} if kind else {}
    try:
        model: Any = load_adapter(adapter, kind and kind.auto, labels, base)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} If the base model has moved, name its place with --base.") from error
    merged = merged_base(model)
    has_tokenizer = (Path(adapter) / "tokenizer_config.json").is_file()
    tokenizer = load_processing_class(adapter if has_tokenizer else str(base or config.base_model_name_or_path))
    merged.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"Merged model saved in {out}")
