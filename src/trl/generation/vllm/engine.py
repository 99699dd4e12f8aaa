"""Engines with their own copy of the policy: requests, when weights are sent; and vLLM in the training process."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from operator import itemgetter
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedTokenizerBase

from trl.checkpoints.progress import together
from trl.generation.engine import Generated, Numbers, Prompts, Sampling, check_requests, completion_limits
from trl.generation.live import Listener, Live, Scored, check_alone
from trl.generation.live import Request as LiveRequest
from trl.generation.main_process import any_process, process_count
from trl.generation.serving.connection import Json
from trl.generation.transformers.engine import MIXED, context_length_of, generating, without_wrappers
from trl.generation.transformers.requests import end_tokens, fresh_seed, rng_stream_keys
from trl.generation.vllm.backend import Answer, Request, Steps, check_vllm
from trl.generation.vllm.weights import WeightParts, check_sendable
from trl.models.distributed import reshard
from trl.models.parts import causal_core

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from vllm import LLM  # pyright: ignore

_SEEDS = 1 << 62  # vLLM takes signed 64-bit numbers


class PolicyCopy(ABC):
    """Completions by a copy of the policy, which `sync_weights` updates, with adapters added.

    Log-probs are the copy's, under the distribution that was sampled from; they differ from the policy's by the
    rounding of other kernels, and `kept` is unknown. `context_length` is the maximum of prompt and completion tokens
    (None: the model's), `regex` a pattern that every completion matches.
    """

    exact = False

    def __init__(
        self, model: nn.Module, *, accelerator: Accelerator | None, context_length: int | None, regex: str | None
    ) -> None:
        self.model, self.accelerator = model, accelerator
        self.context_length, self.regex = context_length, regex
        self._sent: tuple[int, ...] | None = None  # identifies the weights of the copy
        check_sendable(without_wrappers(model))

    @property
    @abstractmethod
    def together(self) -> bool:
        """Whether several processes must generate at the same time."""

    @abstractmethod
    def _completed(self, requests: list[Request]) -> list[Answer]:
        """The completions of this process's requests."""

    @abstractmethod
    def _send(self, parts: WeightParts) -> None:
        """Send these weights to the copy."""

    def _in_all(self, act: Callable[[], None]) -> None:
        """Do it, and raise an error of any process that generates at the same time."""
        together(act)

    def forget(self) -> None:
        """Send the weights again at the next `sync_weights`, for example after loading others."""
        self._sent = None

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, streams: Numbers = None, limits: Numbers = None
    ) -> list[Generated]:
        """One completion per prompt, in order; see `Engine.generate`.

        Each request has its own seed, derived from the seed and its stream; rounding may depend on the batch. Raises:
        ValueError (in all processes that generate together), RuntimeError for aborted completions.
        """
        requests: list[Request] = []
        self._in_all(lambda: requests.extend(self.requests(prompts, sampling, streams, limits)))
        return [self.generated(answer, sampling) for answer in self._completed(requests)]

    def requests(self, prompts: Prompts, sampling: Sampling, streams: Numbers, limits: Numbers) -> list[Request]:
        """What vLLM is sent for each prompt. Raises: ValueError for invalid prompts."""
        core = causal_core(without_wrappers(self.model))
        context_length = context_length_of(core, self.context_length)
        rows, names = check_requests(prompts, streams, context_length=context_length, vocabulary=None)
        longest = completion_limits([len(prompt) for prompt in rows], sampling, context_length, limits)
        keys = rng_stream_keys(fresh_seed() if sampling.seed is None else sampling.seed, names)
        shared = _shared_settings(sampling, end_tokens(sampling.stop_token_ids, core), self.regex)
        requests = []
        for prompt, limit, key in zip(rows, longest, keys.tolist(), strict=True):
            least = max(sampling.min_new_tokens, sampling.min_length - len(prompt), 0)
            settings = shared | {"max_tokens": limit, "min_tokens": min(limit, least)}
            if not sampling.greedy:
                settings["seed"] = key % _SEEDS
            requests.append({"prompt_ids": list(prompt), "sampling": settings})
        return requests

    def generated(self, answer: Answer, sampling: Sampling) -> Generated:
        """vLLM's answer as a completion. Raises: RuntimeError and ValueError, see `generate`."""
        ids, finish_reason = list(answer["ids"]), answer["finish_reason"]
        if finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a completion with {finish_reason!r}. See its log.")
        if sampling.vocabulary is not None and (last := max(ids, default=0)) >= sampling.vocabulary:
            fault = f"a completion has token id {last}, expected ids below {sampling.vocabulary}"
            raise ValueError(f"{fault}, which policy and teacher both have. Generate without vLLM (use_vllm=False).")
        return Generated(ids, torch.tensor(answer["logprobs"], dtype=torch.float32), None, finish_reason)

    def sync_weights(self, model: nn.Module, step: int) -> None:
        """Send the weights of `model` to the copy, if they changed in any process."""
        self.model = model
        reshard(model)  # versions of gathered copies say nothing
        versions = tuple(parameter._version for parameter in model.parameters())
        state = (step, id(model), hash(versions))
        if any_process(state != self._sent):
            self._sent = None
            self._send_all()
            self._sent = state

    def _send_all(self) -> None:
        dtype = MIXED.get(getattr(self.accelerator, "mixed_precision", "no"))
        if not isinstance(self.model, FullyShardedDataParallel):
            self._send(WeightParts(self.model, dtype))
            return
        with generating(self.model, self.accelerator) as whole:  # FSDP1 gathers the whole model only
            self._send(WeightParts(whole, dtype))


def _shared_settings(sampling: Sampling, ends: Sequence[int], regex: str | None) -> Json:
    sampling.refuse_processors("vLLM")
    settings: Json = {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted(ends),
        "ignore_eos": True,  # the end tokens are among stop_token_ids
        "logprobs": 0,
        "detokenize": bool(sampling.stop_strings),
    }
    if not sampling.greedy:
        settings["top_p"] = 1.0 if sampling.top_p is None else sampling.top_p
        settings |= {"top_k": sampling.top_k or 0, "min_p": sampling.min_p or 0.0}
    if sampling.stop_strings:
        settings |= {"stop": list(sampling.stop_strings), "include_stop_str_in_output": True}
    if regex is not None:
        settings["structured_outputs"] = {"regex": regex}
    return settings


class CopySteps(Protocol):
    """Requests to a copy that come and go between its steps: `Steps`, or those of a server."""

    @property
    def busy(self) -> bool: ...
    def submit(self, request: Request, listener: Listener | None = None) -> int: ...
    def cancel(self, request: int) -> None: ...
    def step(self) -> dict[int, Answer]: ...


class LiveCopy:
    """A `Live` engine over the `steps` of a copy of the policy."""

    def __init__(self, copy: PolicyCopy, steps: CopySteps) -> None:
        self.copy, self.steps = copy, steps
        self._sampling: dict[int, Sampling] = {}
        self._early: dict[int, Answer] = {}  # to requests that ended while a prompt was scored

    @property
    def busy(self) -> bool:
        return self.steps.busy or bool(self._early)

    def submit(self, request: LiveRequest) -> int:
        limits = None if request.limit is None else [request.limit]
        (message,) = self.copy.requests([request.prompt], request.sampling, [request.stream], limits)
        number = self.steps.submit(message, request.listener)
        self._sampling[number] = request.sampling
        return number

    def cancel(self, request: int) -> None:
        self._sampling.pop(request, None)
        self.steps.cancel(request)

    def step(self) -> dict[int, Generated]:
        early, self._early = self._early, {}
        return {
            number: self.copy.generated(answer, self._sampling.pop(number))
            for number, answer in (early or self.steps.step()).items()
            if number in self._sampling  # else it was cancelled
        }

    def prompt_logps(self, prompt: Sequence[int], count: int) -> list[Scored]:
        """Log-probs of a prompt's tokens but the first, and of the `count` most likely there. Raises: ValueError."""
        (request,) = self.copy.requests([prompt], Sampling(max_new_tokens=1, seed=0), [0], None)
        request["sampling"]["prompt_logprobs"] = count
        number = self.steps.submit(request)
        while number not in self._early:
            self._early |= self.steps.step()
        places = zip(request["prompt_ids"][1:], self._early.pop(number)["prompt_logprobs"], strict=True)
        return [
            [*sorted(entries, key=itemgetter(2))[:count], *(entry for entry in entries if entry[0] == token)]
            for token, entries in places
        ]


class VLLMEngine(PolicyCopy):
    """Completions by vLLM in this process: one copy of the policy for each `parallel` processes.

    The copy is built from the policy's config and tokenizer, and gets its weights from `sync_weights`. Processes that
    share a copy must call `generate` together, with any number of requests each. `memory` is its share of the device's
    in (0, 1], released between generations with `sleeps` (GPUs); `context_length` the maximum of prompt and completion
    tokens (None: the model's); `implementation` whose code of the model runs, `"vllm"` or `"transformers"`. Raises:
    ImportError without vLLM, ValueError if `parallel` does not divide the number of processes.
    """

    def __init__(
        self, model: nn.Module, *, tokenizer: PreTrainedTokenizerBase | None = None,
        accelerator: Accelerator | None = None, context_length: int | None = None, regex: str | None = None,
        memory: float = 0.3, parallel: int = 1, implementation: str = "vllm", sleeps: bool = False,
    ) -> None:  # fmt: skip
        check_vllm()
        super().__init__(model, accelerator=accelerator, context_length=context_length, regex=regex)
        self.tokenizer, self.sleeps = tokenizer, sleeps
        self._sharing = _sharing(parallel)
        self._arguments = {
            "gpu_memory_utilization": memory, "max_model_len": context_length, "model_impl": implementation,
            "tensor_parallel_size": parallel, "enable_sleep_mode": sleeps,
        }  # fmt: skip
        self._asleep = False
        self._llm: LLM | None = None

    @property
    def together(self) -> bool:
        return self._sharing is not None

    check_live = check_alone

    @contextmanager
    def live(self) -> Iterator[Live]:
        """Inside the block, requests come and go. Raises: ValueError as `check_live`."""
        self.check_live()
        with self._awake() as llm, closing(Steps(llm.llm_engine)) as steps:
            yield LiveCopy(self, steps)

    def close(self) -> None:
        self._llm, self._sent = None, None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _in_all(self, act: Callable[[], None]) -> None:
        together(act, self._sharing) if self._sharing is not None else act()

    def _completed(self, requests: list[Request]) -> list[Answer]:
        count, first = len(requests), 0
        if self._sharing is not None:
            parts = together(lambda: requests, self._sharing)
            first = sum(map(len, parts[: torch.distributed.get_rank(self._sharing)]))
            requests = [request for part in parts for request in part]
        if not requests:
            return []
        with self._awake() as llm:
            return Steps(llm.llm_engine).complete(requests)[first : first + count]

    def _send(self, parts: WeightParts) -> None:
        with parts.read() as weights, self._awake() as llm:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            llm.reset_prefix_cache()

    @contextmanager
    def _awake(self) -> "Iterator[LLM]":
        """vLLM with its memory on the device; with `sleeps` it is released afterwards."""
        llm = self._llm = self._llm or self._built()
        if self._asleep:
            llm.wake_up()
            self._asleep = False
        try:
            yield llm
        finally:
            if self.sleeps:
                llm.sleep(level=1)
                self._asleep = True

    def _built(self) -> "LLM":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are passed within the process
        from vllm import LLM  # pyright: ignore

        core = causal_core(without_wrappers(self.model))
        dtype = MIXED.get(getattr(self.accelerator, "mixed_precision", "no")) or core.dtype
        launched = torch.distributed.is_available() and torch.distributed.is_initialized()
        with TemporaryDirectory() as folder:
            core.config.save_pretrained(folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
            return LLM(
                model=folder, skip_tokenizer_init=self.tokenizer is None, load_format="dummy",
                dtype=str(dtype).removeprefix("torch."), logprobs_mode="processed_logprobs", seed=0, **self._arguments,
                distributed_executor_backend="external_launcher" if launched else None,
            )  # fmt: skip


def _sharing(parallel: int) -> "ProcessGroup | None":
    """The group of processes that share one copy with this process; None for one process."""
    if parallel == 1:
        return None
    import torch.distributed as dist

    processes = process_count()
    if processes % parallel:
        raise ValueError(f"vllm_tensor_parallel_size={parallel} must divide {processes} processes.")
    blocks = [list(range(first, first + parallel)) for first in range(0, processes, parallel)]
    groups = [dist.new_group(ranks) for ranks in blocks]  # every process must build all of them
    return groups[dist.get_rank() // parallel]  # type: ignore[return-value]
