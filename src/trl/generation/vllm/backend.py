"""The backend of `trl vllm-serve`: vLLM, with its engine and workers in separate processes."""

from __future__ import annotations  # field types are recorded as they are written

import base64
import binascii
import io
import itertools
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trl.generation.serving.connection import Json
from trl.options.groups import OptionGroup, option

if TYPE_CHECKING:
    from PIL import Image
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams  # pyright: ignore
    from vllm.logprobs import Logprob  # pyright: ignore
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore

    from trl.generation.live import Listener

Request = Mapping[str, Any]
"""`prompt_ids` and `sampling` (arguments of vLLM's `SamplingParams`), as JSON values."""
Answer = Json
"""JSON values; of a completion `ids`, `logprobs` and `finish_reason`."""
Result = TypeVar("Result")
WORKER = "trl.generation.vllm.worker.WeightReceiver"
_CLOSING_S = 30.0  # for the engine to end
_SHARED_MEMORY = Path("/dev/shm")


@dataclass
class ServedModel(OptionGroup):
    """Arguments of `vllm.LLM`, with their names there."""

    model: str = field(metadata={"help": "Folder or Hub name of the model."})
    revision: str | None = option(None, "Branch, tag or commit of the model. By default the default branch.")
    tensor_parallel_size: int = option(1, "Number of GPUs over which the model is split.", ">= 1")
    data_parallel_size: int = option(1, "Only 1: for more copies of the model, start more servers.", "[1, 1]")
    gpu_memory_utilization: float = option(0.9, "Share of each device's memory that vLLM uses.", "(0, 1]")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option("auto", "Dtype; `auto` is the checkpoint's.")
    max_model_len: int | None = option(None, "Longest prompt and completion. None: the model's.", ">= 1")
    enable_prefix_caching: bool | None = option(None, "Cache common prefixes of prompts. None: vLLM decides.")
    enforce_eager: bool = option(False, "Run without CUDA graphs: less memory, slower generation.")
    kv_cache_dtype: str = option("auto", "Dtype of the key-value cache; `fp8` saves memory.")
    trust_remote_code: bool = option(False, "Run the model's own code from its repository.")
    vllm_model_impl: Literal["vllm", "transformers", "auto"] = option("vllm", "Whose code of the model runs.")


class NoChannel(RuntimeError):
    """There is no weight channel, or it broke."""


class BackendDied(RuntimeError):
    """vLLM's engine has ended."""


def check_vllm(needed_by: str = "use_vllm") -> None:
    if find_spec("vllm") is None:
        raise ImportError(f"{needed_by} needs the vllm package. Install it with `pip install 'trl[vllm]'`.")


def make_llm(served: ServedModel, extension: str) -> LLM:
    """`vllm.LLM` of a served model, whose workers have the methods of the class `extension`."""
    from vllm import LLM  # pyright: ignore

    arguments = {item.name: getattr(served, item.name) for item in fields(ServedModel)}
    del arguments["data_parallel_size"]
    arguments["model_impl"] = arguments.pop("vllm_model_impl")
    return LLM(
        **arguments, tokenizer_revision=served.revision, worker_extension_cls=extension,
        logprobs_mode="processed_logprobs", seed=0,
    )  # fmt: skip


def llm_worker(script_args: ServedModel, data_parallel_rank: int, master_port: int, connection: Connection) -> None:
    """Load a model into vLLM, send `{"status": "ready"}`, and run commands until `{"type": "shutdown"}` or the end.

    A command (of servers of 0.16-0.26) is `{"type": "call", "method": ..., "args": ..., "kwargs": ...}`: a method of
    `vllm.LLM`, whose result is sent back; none is for "fire_and_forget".
    """
    facts = {"RANK": data_parallel_rank, "RANK_LOCAL": data_parallel_rank, "MASTER_PORT": master_port}
    facts["SIZE"] = script_args.data_parallel_size
    os.environ.update({f"VLLM_DP_{name}": str(value) for name, value in facts.items()})
    llm = make_llm(script_args, "trl.generation.vllm.worker.WeightSyncWorkerExtension")
    connection.send({"status": "ready"})
    with suppress(EOFError, KeyboardInterrupt):
        while (command := connection.recv())["type"] != "shutdown":
            method = getattr(llm, command["method"])
            result = method(*command.get("args", ()), **command.get("kwargs", {}))
            if command["type"] == "call":
                connection.send(result)
    llm.collective_rpc("close_communicator")


class Steps:
    """Requests to vLLM's `engine` (`LLMEngine`) that come and go between its steps. One thread calls its methods.

    A request has `prompt_ids` and `sampling` (arguments of vLLM's `SamplingParams`), its answer `ids`, `logprobs` and
    `finish_reason`. A request with `prompt_logprobs` in its `sampling` gets them too: for each token of the prompt but
    the first a list of (token, log-prob, rank). `unusable` is why no request may begin.
    """

    _numbers = itertools.count()  # no other request of this process has the same

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.unusable: str | None = None
        # Their listeners, and how many tokens these were given.
        self._running: dict[int, tuple[Listener | None, int]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request, listener: Listener | None = None) -> int:
        """Begin a completion; its number. Raises: ValueError for an invalid request, BackendDied."""
        if self.unusable is not None:
            raise RuntimeError(self.unusable)
        number, settings = next(self._numbers), sampling_params(request.get("sampling", {}))
        if listener is None:
            from vllm.sampling_params import RequestOutputKind  # pyright: ignore

            settings.output_kind = RequestOutputKind.FINAL_ONLY
        with as_value_errors():
            self.engine.add_request(str(number), {"prompt_token_ids": request["prompt_ids"]}, settings)
        self._running[number] = listener, 0
        return number

    def cancel(self, request: int) -> None:
        if request in self._running:
            del self._running[request]
            with as_value_errors():
                self.engine.abort_request([str(request)])

    def step(self) -> dict[int, Answer]:
        """Draw tokens; the answers to requests that ended. Raises: BackendDied."""
        try:
            answers = self.engine.step()
        except Exception as error:
            raise BackendDied(f"vLLM's engine has ended: {error} See its log.") from error
        ended = {}
        for answer in answers:
            number, output = int(answer.request_id), answer.outputs[0]
            if number not in self._running:  # cancelled
                continue
            ids, logps = drawn(output)
            listener, heard = self._running[number]
            if listener is not None:
                listener(ids[heard:])
                self._running[number] = listener, len(ids)
            if answer.finished:
                del self._running[number]
                ended[number] = {"ids": ids, "logprobs": logps, "finish_reason": output.finish_reason}
                if (scores := getattr(answer, "prompt_logprobs", None)) is not None:
                    places = [place.items() for place in scores[1:]]
                    ended[number]["prompt_logprobs"] = [[(t, x.logprob, x.rank) for t, x in place] for place in places]
        return ended

    def complete(self, requests: Sequence[Request]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        try:
            numbers = [self.submit(request) for request in requests]
            while self.busy:
                answers |= self.step()
        finally:
            self.close()
        return [answers[number] for number in numbers]

    def close(self) -> None:
        for number in list(self._running):
            self.cancel(number)


class VLLMBackend:
    """vLLM for a `GenerationServer`. Methods may be called in any thread.

    One thread runs vLLM's steps; requests join and leave between them. Everything else waits until no request runs, and
    what comes after it waits for it. Raises: ImportError without vLLM, and what vLLM raises.
    """

    def __init__(self, served: ServedModel) -> None:
        check_vllm()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # else the engine blocks signals and other threads
        from trl.generation.live import Broker

        self._llm = make_llm(served, WORKER)
        self.served, self.world_size = served, served.tensor_parallel_size
        self.channel: str | None = None
        self._llm.collective_rpc("end_with", args=(os.getpid(),))
        self._shared = {name for name in self._llm.collective_rpc("shared_memory_name") if name}
        self.steps, self.broker, self._closing = Steps(self._llm.llm_engine), Broker(), threading.Event()
        threading.Thread(target=self._run, name="vllm-steps", daemon=True).start()

    def _run(self) -> None:
        with suppress(BackendDied):  # which requests are told
            self.broker.run(self.steps, self._closing.is_set)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise BackendDied if vLLM's engine has ended."""
        resources = getattr(self._llm.llm_engine.engine_core, "resources", None)
        if getattr(resources, "engine_dead", False):
            raise BackendDied("vLLM's engine has ended. See the server's log.")

    def about(self) -> Answer:
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

    def submit(self, request: Request) -> Future[Answer]:
        """Begin a completion, see `Steps`; cancelling the future ends it."""
        return self.broker.submit(request)

    def generate(self, body: Any) -> Answer:
        inputs: list[Json] = [{"prompt" if isinstance(x, str) else "prompt_token_ids": x} for x in body.prompts]
        for index, prompt in enumerate(inputs):
            if images := [_image(image) for image in body.images_of(index)]:
                prompt["multi_modal_data"] = {"image": images}  # vLLM replaces placeholders by the images' tokens
        return self._listed("generate", inputs, body)

    def chat(self, body: Any) -> Answer:
        names = ("chat_template", "tools", "chat_template_kwargs")
        return self._listed("chat", body.messages, body, **{name: getattr(body, name) for name in names})

    def _listed(self, method: str, inputs: Sequence[object], body: Any, **options: object) -> Answer:
        """The token ids of the prompts, and the completions of all of them in one list, ordered by prompt."""
        keep, settings = body.truncate_prompt_tokens, sampling_params(body.sampling())
        options["tokenization_kwargs"] = None if keep is None else {"truncate_prompt_tokens": keep}

        def run(steps: Steps) -> list[RequestOutput]:
            if steps.unusable is not None:
                raise RuntimeError(steps.unusable)
            return getattr(self._llm, method)(inputs, settings, use_tqdm=False, **options) if inputs else []

        answers = self._alone(run)
        completions = [drawn(output) for answer in answers for output in answer.outputs]
        return {
            "prompt_ids": [list(answer.prompt_token_ids) for answer in answers],
            "completion_ids": [ids for ids, _ in completions],
            "logprobs": [logprobs for _, logprobs in completions],
        }

    def join(self, *, host: str, port: int, size: int, backend: Literal["gloo", "nccl"], timeout_s: float) -> None:
        """Join a weight channel with all workers, and leave the older one."""
        device = self.about()["device"]
        if backend == "nccl" and device != "cuda":
            raise ValueError(f"backend must be 'gloo' for a server on {device}, got 'nccl'.")

        def run(steps: Steps) -> None:
            self.channel = None
            self._on_workers("join_weight_channel", host, port, size, backend, timeout_s)
            self.channel = secrets.token_hex(8)

        self._alone(run)

    def load(self, weights: Sequence[Any], *, whole: bool) -> None:
        """Receive and load weights (`WeightBody`; `whole`: all of a checkpoint), and clear the prefix cache."""
        if self.channel is None:
            raise NoChannel("There is no weight channel. Call init_communicator first.")
        if not whole and self.about()["device"] == "cpu":
            raise ValueError("a CPU's packed weights are updated together. Use update_model_params.")
        entries = [(weight.name, weight.dtype, weight.shape) for weight in weights]

        def run(steps: Steps) -> None:
            try:
                self._on_workers("receive_weights", entries, whole)
            except RuntimeError as error:
                self.channel = None
                steps.unusable = f"The last update of the weights failed ({error}). Send all of them again."
                raise
            steps.unusable = None if whole else steps.unusable
            self._llm.reset_prefix_cache()

        self._alone(run)

    def leave(self, channel: str | None = None) -> None:
        """Leave the weight channel, if it is open and has this name (None: any)."""

        def run(steps: Steps) -> None:
            if channel in (None, self.channel):
                self.channel = None
                self._llm.collective_rpc("leave_weight_channel")

        self._alone(run)

    def reset_prefix_cache(self) -> None:
        self._alone(lambda steps: self._llm.reset_prefix_cache())

    def close(self) -> None:
        """End the engine and its workers, and remove their shared memory."""
        self._closing.set()
        self.broker.wake()
        self._llm.llm_engine.engine_core.shutdown(timeout=_CLOSING_S)
        for name in self._shared:  # would prevent another server with this name from starting
            for file in _SHARED_MEMORY.glob(f"{name}-*cpushm*"):
                file.unlink(missing_ok=True)

    def _alone(self, function: Callable[[Steps], Result]) -> Result:
        """What a function gives while no request runs. Raises: BackendDied, ValueError for invalid requests."""
        with as_value_errors():
            return self.broker.call(function, alone=True).result()

    def _on_workers(self, method: str, *arguments: object) -> None:
        """Call a method of `WeightReceiver` on all workers. Raises: RuntimeError with the errors of all of them."""
        answers = self._llm.collective_rpc(method, args=arguments)
        errors = {f"worker {rank}: {text}" for rank, text in enumerate(answers) if isinstance(text, str)}
        if errors:
            raise RuntimeError("; ".join(sorted(errors)))


def sampling_params(arguments: Mapping[str, object]) -> SamplingParams:
    """vLLM's `SamplingParams` of these arguments, with log-probs of sampled tokens. Raises: ValueError for others."""
    if any(name.startswith("_") or name in ("output_kind", "skip_clone") for name in arguments):
        names = ", ".join(sorted(arguments))
        raise ValueError(f"Sampling arguments must be public ones of vLLM's SamplingParams, got {names}.")
    from vllm import SamplingParams  # pyright: ignore
    from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore

    settings: Json = {**arguments, "logprobs": 0}
    if settings.get("top_k") == -1:
        settings["top_k"] = 0  # all tokens
    try:
        with as_value_errors():
            if isinstance(settings.get("structured_outputs"), dict):
                settings["structured_outputs"] = StructuredOutputsParams(**settings["structured_outputs"])
            return SamplingParams(**settings)
    except TypeError as error:
        raise ValueError(f"Sampling arguments must be those of vLLM's SamplingParams: {error}.") from None


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Turn vLLM's errors: of invalid requests into ValueErrors (no longer such in 0.32), of a dead engine."""
    from vllm import exceptions  # pyright: ignore
    from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore

    try:
        yield
    except EngineDeadError as error:
        raise BackendDied(f"vLLM's engine has ended: {error} See its log.") from error
    except getattr(exceptions, "VLLMClientError", ValueError) as error:
        raise ValueError(str(error)) from error


def _image(text: str) -> Image.Image:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(base64.b64decode(text, validate=True))).convert("RGB")
    except (binascii.Error, OSError) as error:
        raise ValueError(f"images must be PNG or JPEG in base64, got {text[:20]!r}...: {error}.") from None


def drawn(output: CompletionOutput) -> tuple[list[int], list[float]]:
    """A completion's tokens, and their log-probs under the distribution that they were drawn from."""
    ids = list(output.token_ids)
    return ids, [step[token].logprob for token, step in zip(ids, output.logprobs, strict=True)]


def chunk_list(lst: list, n: int) -> list[list]:
    """A list in `n` parts of equal length; the first ones are one longer if `n` does not divide it.

    >>> chunk_list([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size, longer = divmod(len(lst), n)
    ends = [part * size + min(part, longer) for part in range(n + 1)]
    return [lst[start:end] for start, end in itertools.pairwise(ends)]


def sanitize_logprob(logprob: Logprob) -> float | None:
    """The value of vLLM's log-prob; None for NaN, which JSON does not have."""
    return None if math.isnan(logprob.logprob) else logprob.logprob
