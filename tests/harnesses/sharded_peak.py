"""The peak of live bytes of SFT under FSDP2 with two processes on a CPU, measured and planned.

torchrun --nproc_per_node 2 -m tests.harnesses.sharded_peak     # two minutes on two slow cores
"""

import gc
import os
import tempfile
import weakref
from typing import Any

from tests.trainer.sharded_worker import use_fsdp_on_cpu

use_fsdp_on_cpu()

import torch  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from datasets import Dataset  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import trl  # noqa: E402
from tests.harnesses.live_peak import llama, tokenizer, with_numbers  # noqa: E402
from trl.scripts.planning.plan import plan_of  # noqa: E402
from trl.scripts.planning.run import Run  # noqa: E402
from trl.scripts.planning.state import sharding_of  # noqa: E402

LENGTH = 32
DEEP, VOCABULARY = llama(512, 192, 8), llama(4096, 128, 4)
CASES: list[tuple[Any, dict[str, Any]]] = [
    (DEEP, {"bf16": True}),
    (DEEP, {"bf16": False}),
    (DEEP, {"bf16": True, "gradient_accumulation_steps": 2}),
    (VOCABULARY, {"bf16": True}),
    (VOCABULARY, {"bf16": True, "gradient_checkpointing": False}),
    (VOCABULARY, {"bf16": True, "per_device_train_batch_size": 8}),
]


class PresentBytes(TorchDispatchMode):
    """A block that adds up the storages of all tensors seen in it by their present size: FSDP2 resizes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.peak = 0

    def see(self, tensor: Tensor) -> None:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = weakref.ref(storage, lambda _: self.storages.pop(key, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args, kwargs)):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        present = [storage() for storage in [*self.storages.values()]]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in present if storage is not None))
        return result


def present_peak(config: Any, args: Any) -> int:
    """The most bytes over two steps."""
    trainer = trl.SFTTrainer(
        model=with_numbers(config, torch.float32), args=args, processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"input_ids": [9] * LENGTH}] * 64),
    )  # fmt: skip
    plugin = AcceleratorState().fsdp_plugin
    if args.bf16 and plugin is not None:  # accelerate (1.15) does this for accelerators only
        plugin.set_mixed_precision("bf16", override=True)
    gc.collect()
    with PresentBytes() as live:
        trainer.train()
    return live.peak


def main() -> None:
    for config, settings in CASES:
        with tempfile.TemporaryDirectory() as folder:
            args: Any = trl.SFTConfig(
                folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, max_steps=2, max_length=LENGTH,
                learning_rate=1e-4, **{"per_device_train_batch_size": 2, **settings},
            )  # fmt: skip
            peak = present_peak(config, args)
        sharding = sharding_of("fsdp2", torch.distributed.get_world_size(), half=bool(args.bf16))
        planned = plan_of(Run("sft", config, args, trl.ModelConfig("model"), sharding))
        if torch.distributed.get_rank() == 0:
            print(f"{settings} {peak / 1e6:.2f} MB {planned.peak / peak - 1:+.2%}  {planned.phase}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
