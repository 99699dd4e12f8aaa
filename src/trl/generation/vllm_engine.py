"""vLLM in the process that trains: rollouts from a copy of the policy that is brought up to date before each phase."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from trl.generation.checkpoint_weights import checkpoint_weights
from trl.generation.engine import Generated, Sampling, check_requests, completion_limits
from trl.generation.phase import generating, without_wrappers
from trl.generation.request_state import fresh_seed
from trl.generation.stopping import end_tokens
from trl.generation.streams import stream_keys
from trl.generation.transformers_engine import MIXED, context_window
from trl.models.parts import causal_core

_SEEDS = 1 << 62  # vLLM takes signed 64-bit numbers
_Request = tuple[tuple[int, ...], int, int]  # a prompt, the most tokens of its completion, its seed


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """How vLLM is set up: `memory` is its share of the device's memory in (0, 1], `window` the most tokens of prompt and
    completion (None: the model's), `implementation` whose code of the model runs (`"vllm"`, `"transformers"`), `sleeps`
    whether its memory is given back between generations (GPUs), `regex` what every completion must match, `parallel` over
    how many processes one copy is split (tensor parallelism)."""

    memory: float = 0.3
    parallel: int = 1
    window: int | None = None
    implementation: str = "vllm"
    sleeps: bool = False
    regex: str | None = None


class VLLMEngine:
    """Completions by vLLM in this process: one copy for each process that trains, or for each `settings.parallel` of them.

    The copy is made from the policy's config, and gets its weights from `sync_weights`, adapters added on the way: nothing
    is read from or written to a checkpoint but the config and the tokenizer. Log-probs are vLLM's, of the distribution that
    was sampled from; they differ from the policy's by the rounding of other kernels, and `kept` is never known. Processes
    that share a copy must call `generate` together, with any number of requests each.

    Raises: ImportError where vLLM is missing, ValueError for processes that `parallel` does not divide.
    """

    exact = False

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any | None = None,
        accelerator: Any | None = None,
        settings: VLLMSettings | None = None,
        gather_zero3: bool = True,
    ) -> None:
        check_vllm()
        self.model, self.tokenizer, self.accelerator = model, tokenizer, accelerator
        self.settings, self.gather_zero3 = settings or VLLMSettings(), gather_zero3
        self._sharing = _sharing(self.settings.parallel)
        self._sent: tuple[int, ...] | None = None  # which weights vLLM has
        self._asleep = False
        self._llm: Any = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        streams: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Generated]:
        """One completion per prompt, in order; see `Engine.generate`.

        Each request has a seed of its own, made of the seed and its stream; vLLM's kernels may round otherwise in another
        batch. Raises: ValueError for prompts that cannot be completed.
        """
        core = self._core()
        window = context_window(core, self.settings.window)
        found, names = check_requests(prompts, streams, window=window, vocabulary=None)
        longest = completion_limits([len(prompt) for prompt in found], sampling, window, limits)
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        keys = stream_keys(seed, names).tolist() if names else []
        own = list(zip(found, longest, [int(key) % _SEEDS for key in keys], strict=True))
        requests, first = self._of_all_sharing(own)
        if not requests:
            return []
        ends = sorted(end_tokens(sampling.stop_token_ids, core))
        with self._awake() as engine:
            answers = engine.generate(
                [{"prompt_token_ids": list(prompt)} for prompt, _, _ in requests],
                [self._request(sampling, ends, *request) for request in requests],
                use_tqdm=False,
            )
        return [_generated(answer.outputs[0]) for answer in answers[first : first + len(own)]]

    @property
    def together(self) -> bool:
        """Whether other processes share this copy."""
        return self._sharing is not None

    def sync_weights(self, model: nn.Module, step: int) -> None:
        """Send the weights of `model` to vLLM, unless it has them."""
        self.model = model
        versions = tuple(parameter._version for parameter in model.parameters())
        state = (step, id(model), hash(versions))
        if state == self._sent:
            return
        with generating(model, self.accelerator, gather_zero3=self.gather_zero3) as whole:
            weights = checkpoint_weights(whole)
            with self._awake() as engine:
                engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
                engine.reset_prefix_cache()
        self._sent = state

    def close(self) -> None:
        """Give vLLM's memory back."""
        self._llm, self._sent = None, None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _core(self) -> Any:
        return causal_core(without_wrappers(self.model))

    def _of_all_sharing(self, own: list[_Request]) -> tuple[list[_Request], int]:
        """The requests of all processes that share this copy, and the place of the first of this process."""
        if self._sharing is None:
            return own, 0
        import torch.distributed as dist

        found: list[Any] = [None] * self.settings.parallel
        dist.all_gather_object(found, own, group=self._sharing)
        before = found[: dist.get_rank(self._sharing)]
        return [request for part in found for request in part], sum(map(len, before))

    @contextmanager
    def _awake(self) -> Iterator[Any]:
        """vLLM with its memory on the device; what it holds sleeps again afterwards."""
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
        """vLLM's own engine, built when it is first needed, with weights that mean nothing yet."""
        if self._llm is not None:
            return self._llm
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over within the process
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        core = self._core()
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
                dtype=str(self._dtype(core)).removeprefix("torch."),
                max_model_len=self.settings.window,
                gpu_memory_utilization=self.settings.memory,
                model_impl=self.settings.implementation,
                enable_sleep_mode=self.settings.sleeps,
                tensor_parallel_size=self.settings.parallel,
                logprobs_mode="processed_logprobs",
                seed=0,
                **distributed,
            )
        return self._llm

    def _dtype(self, core: Any) -> torch.dtype:
        return MIXED.get(getattr(self.accelerator, "mixed_precision", "no")) or core.dtype

    def _request(
        self, sampling: Sampling, ends: Sequence[int], prompt: Sequence[int], limit: int, seed: int
    ) -> Any:
        """One request's settings, as vLLM wants them."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        wanted: dict[str, Any] = {
            "max_tokens": limit,
            "min_tokens": min(limit, max(sampling.min_new_tokens, sampling.min_length - len(prompt), 0)),
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(ends),
            "ignore_eos": True,  # the end tokens are among stop_token_ids
            "logprobs": 0,
            "detokenize": bool(sampling.stop_strings),
        }
        if not sampling.greedy:
            wanted |= {"seed": seed, "top_p": 1.0 if sampling.top_p is None else sampling.top_p}
            wanted |= {"top_k": sampling.top_k or 0, "min_p": sampling.min_p or 0.0}
        if sampling.stop_strings:
            wanted |= {"stop": list(sampling.stop_strings), "include_stop_str_in_output": True}
        if self.settings.regex is not None:
            from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
                StructuredOutputsParams,
            )

            wanted["structured_outputs"] = StructuredOutputsParams(regex=self.settings.regex)
        return SamplingParams(**wanted)


def check_vllm() -> None:
    """Raise ImportError where vLLM is missing."""
    if find_spec("vllm") is None:
        raise ImportError("use_vllm needs the vllm package. Install it with `pip install trl[vllm]`.")


def _sharing(parallel: int) -> Any:
    """The process group of those that share one copy with this process; None where none does."""
    if parallel == 1:
        return None
    import torch.distributed as dist

    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes % parallel:
        raise ValueError(
            f"vllm_tensor_parallel_size={parallel} must divide the number of processes, {processes}. Set it to one of "
            f"{[size for size in range(1, processes + 1) if processes % size == 0]}."
        )
    blocks = [list(range(first, first + parallel)) for first in range(0, processes, parallel)]
    groups = [dist.new_group(ranks) for ranks in blocks]  # every process makes all of them
    return groups[dist.get_rank() // parallel]


def _generated(output: Any) -> Generated:
    ids = list(output.token_ids)
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"vLLM ended a completion with {output.finish_reason!r}, expected 'stop' or 'length'. See its log for the reason."
        )
    logps: Tensor = torch.tensor(
        [step[token].logprob for token, step in zip(ids, output.logprobs, strict=True)], dtype=torch.float32
    )
    return Generated(ids, logps, None, output.finish_reason)
