"""The walk of a row: this library's functions that run from the data set to the loss of a first micro-batch.

`python -m tests.walks` prints how many; `python -m tests.walks sft` also which. Another word names a JSON file for all.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from datasets import Dataset

import trl
from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SOURCE = Path(trl.__file__).parent
STAGES = ("DataSets.train", "PromptSets.__call__", "get_batch_samples", "compute_loss")
"""What is traced, with all that it calls: the preparation of a data set, the batches of a step, the loss of one."""
QUICK = {
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 1, "seed": 11,
    "per_device_train_batch_size": 4,
}  # fmt: skip
USER = {"role": "user", "content": "What colour is the sky?"}
BLUE, GREEN = ({"role": "assistant", "content": text} for text in ("It is blue.", "Green."))


def length_reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def _sft(folder: str, **parts: Any) -> SFTTrainer:
    rows = Dataset.from_list([{"messages": [USER, BLUE]}] * 4)
    return SFTTrainer(args=SFTConfig(folder, **QUICK), train_dataset=rows, **parts)


def _dpo(folder: str, **parts: Any) -> DPOTrainer:
    rows = Dataset.from_list([{"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}] * 4)
    return DPOTrainer(args=DPOConfig(folder, **QUICK), train_dataset=rows, **parts)


def _grpo(folder: str, **parts: Any) -> GRPOTrainer:
    args = GRPOConfig(folder, **QUICK, num_generations=2, max_completion_length=4)
    rows = Dataset.from_list([{"prompt": [USER]}] * 4)
    return GRPOTrainer(reward_funcs=length_reward, args=args, train_dataset=rows, **parts)


WALKS: dict[str, Callable[..., Any]] = {"sft": _sft, "dpo": _dpo, "grpo": _grpo}


def walk_of(kind: str) -> dict[str, list[str]]:
    """The functions on the walk of a row of `sft`, a pair of `dpo` or a prompt of `grpo`, by file.

    Lambdas and comprehensions are no functions, and `_lazy.py`, which Python asks for modules, is not on the way.
    """
    codes: set[CodeType] = set()
    stage: list[FrameType] = []

    def record(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call":
            if not stage and code.co_qualname.endswith(STAGES) and is_ours(code):
                stage.append(frame)
            if stage:
                codes.add(code)
        elif event == "return" and stage and frame is stage[0]:
            stage.clear()

    model, tokenizer = tiny_model("llama", vocab_size=400, pad_token_id=0), tiny_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        previous = sys.getprofile()
        sys.setprofile(record)
        try:
            WALKS[kind](folder, model=model, processing_class=tokenizer).train()
        finally:
            sys.setprofile(previous)
    names: dict[str, set[str]] = {}
    for code in filter(is_ours, codes):
        if not code.co_name.startswith("<"):
            file = Path(code.co_filename).relative_to(SOURCE).as_posix()
            names.setdefault(file, set()).add(code.co_qualname)
    return {file: sorted(names[file]) for file in sorted(names)}


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{SOURCE}/") and not code.co_filename.endswith("/_lazy.py")


if __name__ == "__main__":
    kinds = [word for word in sys.argv[1:] if word in WALKS]
    walks = {kind: walk_of(kind) for kind in kinds or WALKS}
    for kind, files in walks.items():
        print(f"{kind}: {sum(map(len, files.values()))} functions in {len(files)} files")
        if kinds:
            print(*(f"  {file}: {', '.join(functions)}" for file, functions in files.items()), sep="\n")
    for path in set(sys.argv[1:]).difference(kinds):
        Path(path).write_text(json.dumps(walks), encoding="utf-8")
