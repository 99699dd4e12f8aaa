"""What `trl vllm-serve` serves: vLLM, with its engine and its workers in processes of their own."""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import math
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trl.generation.serving.bodies import ChatBody, Drawing, GenerateBody, WeightBody


WORKER = "trl.generation.vllm.worker.WeightReceiver"
_CLOSING_S = 30.0  # for the engine to end by itself
_SHARED_MEMORY = Path("/dev/shm")


@dataclass
class ServedModel:
    """The model, and how vLLM runs it: each field is an argument of `vllm.LLM` with its name there."""

    model: str = field(metadata={"help": "Folder or name on the Hub of the model to serve."})
    revision: str | None = field(
        default=None,
        metadata={"help": "Branch, tag or commit of the model. The default branch if not given."},
    )
    tensor_parallel_size: int = field(
        default=1, metadata={"help": "Over how many GPUs the model is split, each with a worker of its own."}
    )
    data_parallel_size: int = field(
        default=1, metadata={"help": "Only 1: for more copies of the model, start more servers."}
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata={
            "help": "Share in (0, 1] of each GPU's memory that vLLM takes for weights, activations and the key-value cache; "
            "on a CPU, share of the machine's memory."
        },
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = field(
        default="auto",
        metadata={"help": "Dtype of weights and activations; `auto` is that of the checkpoint."},
    )
    max_model_len: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens of prompt and completion together. What the model allows if not given."
        },
    )
    enable_prefix_caching: bool | None = field(
        default=None,
        metadata={
            "help": "Whether prompts that start alike share what was computed for the start. vLLM decides if not given."
        },
    )
    enforce_eager: bool = field(
        default=False,
        metadata={"help": "Run without CUDA graphs: a quicker start and less memory, slower generation."},
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={"help": "Dtype of the key-value cache (`fp8` saves memory); `auto` is the model's."},
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Run the model's own code from its repository. Only if you trust it."},
    )
    vllm_model_impl: Literal["vllm", "transformers", "auto"] = field(
        default="vllm",
        metadata={
            "help": "Whose code of the model runs: vLLM's, that of transformers, or vLLM's where it has some."
        },
    )

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}.")
        if self.data_parallel_size != 1:
            raise ValueError(
                f"data_parallel_size must be 1, got {self.data_parallel_size}. Use tensor_parallel_size, or start one server per copy."
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}.")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1 token, got {self.max_model_len}.")


class NoChannel(RuntimeError):
    """Weights cannot be received: no channel was joined, or it broke."""


class BackendDied(RuntimeError):
    """vLLM's engine has ended for good."""


def check_vllm(needed_by: str = "use_vllm") -> None:
    """Raise ImportError where vLLM is missing."""
    if find_spec("vllm") is None:
        raise ImportError(f"{needed_by} needs the vllm package. Install it with `pip install trl[vllm]`.")


class VLLMBackend:
    """vLLM behind one lock, for a `GenerationServer`: methods may be called in any thread.

    Raises: ImportError where vLLM is missing, whatever vLLM raises for a model that it cannot run.
    """

    def __init__(self, served: ServedModel) -> None:
        check_vllm()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "1"  # or the engine would block signals and other threads
        )
        bind_cpu_workers(served.tensor_parallel_size)
        from vllm import LLM  # pyright: ignore

        arguments = asdict(served)
        del arguments["data_parallel_size"]
        arguments["model_impl"] = arguments.pop("vllm_model_impl")
        self._llm: Any = LLM(
            **arguments,
            tokenizer_revision=served.revision,
            worker_extension_cls=WORKER,
            logprobs_mode="processed_logprobs",
            seed=0,
        )
        self.served, self.world_size = served, served.tensor_parallel_size
        self._lock = threading.Lock()
        self.channel: str | None = None
        self._spoilt: str | None = None  # why the weights are no model's
        self._llm.collective_rpc("end_with", args=(os.getpid(),))
        self._shared = {name for name in self._llm.collective_rpc("shared_memory_name") if name}

    def check(self) -> None:
        """Raise BackendDied where vLLM's engine is gone, which it notices by itself."""
        resources = getattr(self._llm.llm_engine.engine_core, "resources", None)
        if getattr(resources, "engine_dead", False):
            raise BackendDied("vLLM's engine has ended. See the server's log.")

    def about(self) -> dict[str, Any]:
        """Model, dtype, max_model_len, vocab_size and device."""
        from vllm.platforms import current_platform  # pyright: ignore

        config = self._llm.model_config
        return {
            "model": self.served.model,
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "vocab_size": config.get_vocab_size(),
            "device": current_platform.device_type,
        }

    def complete(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One completion for each request, with its log-probs and why it ended."""
        prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
        settings = [sampling_params(request.get("sampling", {})) for request in requests]
        with self._generating() as llm:
            answers = llm.generate(prompts, settings, use_tqdm=False) if prompts else []
        return [_completed(answer.outputs[0]) for answer in answers]

    def generate(self, asked: GenerateBody) -> dict[str, Any]:
        """Completions of prompts."""
        prompts = [_prompt(prompt, asked.images_of(index)) for index, prompt in enumerate(asked.prompts)]
        settings = sampling_params(asked.sampling())
        with self._generating() as llm:
            answers = (
                llm.generate(prompts, settings, use_tqdm=False, tokenization_kwargs=_truncation(asked))
                if prompts
                else []
            )
        return _listed(answers)

    def chat(self, asked: ChatBody) -> dict[str, Any]:
        """Completions of conversations."""
        conversations = asked.messages
        settings = sampling_params(asked.sampling())
        with self._generating() as llm:
            answers = (
                llm.chat(
                    conversations,
                    settings,
                    use_tqdm=False,
                    chat_template=asked.chat_template,
                    tools=asked.tools,
                    chat_template_kwargs=asked.chat_template_kwargs,
                    tokenization_kwargs=_truncation(asked),
                )
                if conversations
                else []
            )
        return _listed(answers)

    def join(
        self, *, host: str, port: int, size: int, backend: Literal["gloo", "nccl"], timeout_s: float
    ) -> None:
        """Join a weight channel with all workers, after leaving the one before."""
        device = self.about()["device"]
        if backend == "nccl" and device != "cuda":
            raise ValueError(f"backend must be 'gloo' for a server on {device}, got 'nccl'.")
        with self._working():
            self.channel = None
            self._on_workers("join_weight_channel", host, port, size, backend, timeout_s)
            self.channel = secrets.token_hex(8)

    def load(self, weights: Sequence[WeightBody], *, whole: bool) -> list[str]:
        """Receive these weights over the channel, load them, and forget what was computed with the old ones. Returns the names of
        the model's weights that did not come, by vLLM's names, where these should be all."""
        if self.channel is None:
            raise NoChannel("There is no weight channel. Call init_communicator first.")
        if not whole and self.about()["device"] == "cpu":
            raise ValueError(
                "vLLM packs its weights on a CPU and takes no single one any more. Send all of them: update_model_params "
                "(/update_weights/)."
            )
        entries = [(weight.name, weight.dtype, weight.shape) for weight in weights]
        with self._working() as llm:
            self._spoilt, before = "An update of the weights is under way.", self._spoilt
            try:
                self._on_workers("receive_weights", entries, whole)
            except RuntimeError as error:
                self.channel = None
                self._spoilt = f"The last update of the weights failed ({error}). Send all of them again."
                raise
            self._spoilt = None if whole else before
            llm.reset_prefix_cache()
            kept = llm.collective_rpc("kept_weights") if whole else []
        return sorted({name for names in kept for name in names})

    def leave(self, channel: str | None = None) -> None:
        """Leave the weight channel, if one was joined; a `channel` of another name is left alone."""
        with self._working() as llm:
            if channel not in (None, self.channel):
                return
            self.channel = None
            llm.collective_rpc("leave_weight_channel")

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for prompts."""
        with self._working() as llm:
            llm.reset_prefix_cache()

    def close(self) -> None:
        """End the engine and its workers, and remove the shared memory that they leave."""
        self._llm.llm_engine.engine_core.shutdown(timeout=_CLOSING_S)
        remove_shared_memory(self._shared, _SHARED_MEMORY)

    @contextmanager
    def _working(self) -> Iterator[Any]:
        """vLLM, for this thread alone. Raises: BackendDied where its engine has ended, ValueError for what it does not take."""
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore

        with self._lock:
            try:
                with as_value_errors():
                    yield self._llm
            except EngineDeadError as error:
                raise BackendDied(f"vLLM's engine has ended: {error} See the server's log.") from error

    @contextmanager
    def _generating(self) -> Iterator[Any]:
        with self._working() as llm:
            if self._spoilt is not None:
                raise RuntimeError(self._spoilt)
            yield llm

    def _on_workers(self, method: str, *arguments: Any) -> None:
        """Call a method of `WeightReceiver` on all workers. Raises: RuntimeError with what any of them says went wrong."""
        said = self._llm.collective_rpc(method, args=arguments)
        errors = {f"worker {rank}: {text}" for rank, text in enumerate(said) if text is not None}
        if errors:
            raise RuntimeError("; ".join(sorted(errors)))


def sampling_params(arguments: dict[str, Any]) -> Any:
    """vLLM's `SamplingParams` of these arguments, with the log-probs of the sampled tokens.

    Raises: ValueError for arguments that do not exist or do not fit.
    """
    private = sorted(
        name for name in arguments if name.startswith("_") or name in ("output_kind", "skip_clone")
    )
    if private:
        raise ValueError(
            f"Sampling arguments must be those of vLLM's SamplingParams, got {', '.join(private)}."
        )
    found: dict[str, Any] = {**arguments, "logprobs": 0}
    if found.get("top_k") == -1:
        found["top_k"] = 0  # every token
    try:
        with as_value_errors():
            return to_sampling_params(found)
    except TypeError as error:
        raise ValueError(f"Sampling arguments must be those of vLLM's SamplingParams: {error}.") from None


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Turn vLLM's errors about what it was asked into ValueErrors, which they are no more (vLLM 0.32)."""
    from vllm import exceptions  # pyright: ignore

    try:
        yield
    except getattr(exceptions, "VLLMClientError", ValueError) as error:
        raise ValueError(str(error)) from error


def bind_cpu_workers(count: int) -> None:
    """Give each of several workers on a CPU its part of the cores, unless the user has said which.

    vLLM (0.32) would ask for as many NUMA nodes as workers. To be removed once it shares out cores itself.
    """
    from vllm.platforms import current_platform  # pyright: ignore

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if count < 2 or not current_platform.is_cpu() or len(cores) < count:
        return
    each = len(cores) // count
    parts = [cores[first * each : (first + 1) * each] for first in range(count)]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, part)) for part in parts))


def remove_shared_memory(names: set[str], folder: Path) -> None:
    """Remove the files of workers that go by these names; another server with one of them could not start."""
    for name in names:
        for file in folder.glob(f"{name}-*cpushm*"):
            file.unlink(missing_ok=True)


def _prompt(prompt: str | list[int], images: Sequence[str]) -> dict[str, Any]:
    """A prompt as vLLM takes it; it turns the images' placeholders into their tokens."""
    found: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    if images:
        found["multi_modal_data"] = {"image": [_image(image) for image in images]}
    return found


def _image(text: str) -> Any:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(base64.b64decode(text, validate=True))).convert("RGB")
    except (binascii.Error, OSError) as error:
        raise ValueError(f"images must be PNG or JPEG in base64, got {text[:20]!r}...: {error}.") from None


def _truncation(asked: Drawing) -> dict[str, Any] | None:
    kept = asked.truncate_prompt_tokens
    return None if kept is None else {"truncate_prompt_tokens": kept}


def _completed(output: Any) -> dict[str, Any]:
    ids, logprobs = drawn(output)
    return {"ids": ids, "logprobs": logprobs, "finish_reason": output.finish_reason}


def _listed(answers: Sequence[Any]) -> dict[str, Any]:
    """Prompts, and the completions of all of them in one list: those of the first prompt come first."""
    found = [drawn(output) for answer in answers for output in answer.outputs]
    return {
        "prompt_ids": [list(answer.prompt_token_ids) for answer in answers],
        "completion_ids": [ids for ids, _ in found],
        "logprobs": [logprobs for _, logprobs in found],
    }


def to_sampling_params(settings: Mapping[str, Any]) -> Any:
    """vLLM's `SamplingParams` of arguments as JSON has them."""
    from vllm import SamplingParams  # pyright: ignore

    found = dict(settings)
    if isinstance(found.get("structured_outputs"), dict):
        from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore

        found["structured_outputs"] = StructuredOutputsParams(**found["structured_outputs"])
    return SamplingParams(**found)


def drawn(output: Any) -> tuple[list[int], list[float]]:
    """A completion's tokens, and the log-prob of each under the distribution that it was drawn from."""
    ids = list(output.token_ids)
    return ids, [step[token].logprob for token, step in zip(ids, output.logprobs, strict=True)]


def chunk_list(lst: list, n: int) -> list[list]:
    """A list in `n` parts, the first of them one longer where it does not divide.

    >>> chunk_list([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size, longer = divmod(len(lst), n)
    ends = [part * size + min(part, longer) for part in range(n + 1)]
    return [lst[start:end] for start, end in itertools.pairwise(ends)]


def sanitize_logprob(logprob: Any) -> float | None:
    """The number of a log-prob of vLLM's; None, which JSON has, where it is NaN."""
    return None if math.isnan(logprob.logprob) else logprob.logprob
