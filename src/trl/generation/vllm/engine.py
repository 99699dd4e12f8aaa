"""vLLM in the training process: rollouts from its copy of the policy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from trl.generation.engine import Generated
from trl.generation.main_process import process_count, raise_in_all
from trl.generation.transformers.engine import MIXED
from trl.generation.vllm.backend import check_vllm, drawn, to_sampling_params
from trl.generation.vllm.policy_copy import PolicyCopy, Request, completion_of
from trl.generation.vllm.weights import WeightParts


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """Settings of vLLM.

    `memory`: its share of the device's memory in (0, 1]. `parallel`: number of processes that share one copy (tensor parallelism).
    `context_length`: maximum of prompt and completion tokens (None: the model's). `implementation`: the model's code, `"vllm"` or
    `"transformers"`. `sleeps`: release memory between generations (GPUs). `regex`: a pattern that every completion matches.
    """

    memory: float = 0.3
    parallel: int = 1
    context_length: int | None = None
    implementation: str = "vllm"
    sleeps: bool = False
    regex: str | None = None


class VLLMEngine(PolicyCopy):
    """Completions by vLLM in this process: one copy of the policy for each `settings.parallel` processes.

    The copy is built from the policy's config and tokenizer, and gets its weights from `sync_weights`. Processes that share a copy
    must call `generate` together, with any number of requests each.

    Raises: ImportError without vLLM, ValueError if `parallel` does not divide the number of processes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any | None = None,
        accelerator: Any | None = None,
        settings: VLLMSettings | None = None,
    ) -> None:
        check_vllm()
        self.tokenizer, self.settings = tokenizer, settings or VLLMSettings()
        own = {"context_length": self.settings.context_length, "regex": self.settings.regex}
        super().__init__(model, accelerator=accelerator, **own)
        self._sharing = _sharing(self.settings.parallel)
        self._asleep = False
        self._llm: Any = None

    @property
    def together(self) -> bool:
        """Whether other processes share this copy."""
        return self._sharing is not None

    def close(self) -> None:
        """Release vLLM's memory."""
        self._llm, self._sent = None, None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _agree(self, failure: Exception | None) -> None:
        if self._sharing is not None:
            raise_in_all(failure, self._sharing)
        elif failure is not None:
            raise failure

    def _completed(self, own: Sequence[Request]) -> list[Generated]:
        requests, first = self._of_all_sharing(list(own))
        if not requests:
            return []
        with self._awake() as engine:
            answers = engine.generate(
                [{"prompt_token_ids": list(request.prompt)} for request in requests],
                [to_sampling_params(request.settings) for request in requests],
                use_tqdm=False,
            )
        outputs = [answer.outputs[0] for answer in answers[first : first + len(own)]]
        return [completion_of(*drawn(output), output.finish_reason) for output in outputs]

    def _send(self, parts: WeightParts) -> None:
        with parts.read() as weights, self._awake() as engine:
            engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            engine.reset_prefix_cache()

    def _of_all_sharing(self, own: list[Request]) -> tuple[list[Request], int]:
        """The requests of all processes that share this copy, and the index of this process's first one."""
        if self._sharing is None:
            return own, 0
        import torch.distributed as dist

        found: list[Any] = [None] * self.settings.parallel
        dist.all_gather_object(found, own, group=self._sharing)
        before = found[: dist.get_rank(self._sharing)]
        return [request for part in found for request in part], sum(map(len, before))

    @contextmanager
    def _awake(self) -> Iterator[Any]:
        """vLLM with its memory on the device; with `sleeps` it is released afterwards."""
        engine = self._engine()
        if self._asleep:
            engine.wake_up()
            self._asleep = False
        try:
            yield engine
        finally:
            if self.settings.sleeps:
                engine.sleep(level=1)
                self._asleep = True

    def _engine(self) -> Any:
        """vLLM's own engine, built on first use with random weights."""
        if self._llm is not None:
            return self._llm
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are passed within the process
        from vllm import LLM  # pyright: ignore

        core = self._core()
        dtype = MIXED.get(getattr(self.accelerator, "mixed_precision", "no")) or core.dtype
        distributed: dict[str, Any] = {}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            distributed = {"distributed_executor_backend": "external_launcher"}
        with TemporaryDirectory() as folder:
            core.config.save_pretrained(folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
            self._llm = LLM(
                model=folder,
                skip_tokenizer_init=self.tokenizer is None,
                load_format="dummy",
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=self.settings.context_length,
                gpu_memory_utilization=self.settings.memory,
                model_impl=self.settings.implementation,
                enable_sleep_mode=self.settings.sleeps,
                tensor_parallel_size=self.settings.parallel,
                logprobs_mode="processed_logprobs",
                seed=0,
                **distributed,
            )
        return self._llm


def _sharing(parallel: int) -> Any:
    """The group of processes that share one copy with this process; None for one process."""
    if parallel == 1:
        return None
    import torch.distributed as dist

    processes = process_count()
    if processes % parallel:
        raise ValueError(
            f"vllm_tensor_parallel_size={parallel} must divide the number of processes, {processes}. Set it to one of "
            f"{[size for size in range(1, processes + 1) if processes % size == 0]}."
        )
    blocks = [list(range(first, first + parallel)) for first in range(0, processes, parallel)]
    groups = [dist.new_group(ranks) for ranks in blocks]  # every process must build all of them
    return groups[dist.get_rank() // parallel]
