"""The HTTP server of `trl vllm-serve`: a FastAPI app over a backend that generates, and its JSON bodies."""

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from trl.generation.serving.connection import Json, resolved
from trl.generation.vllm.backend import BackendDied, NoChannel, VLLMBackend
from trl.reporting.deadlines import start

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    text = f"A server needs {error.name}. Run `pip install 'trl[serve]'`."
    raise ModuleNotFoundError(text, name=error.name) from error

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 512 * 1024**2
_IDLE_S = 120  # until an idle connection is closed
_ENDING_S = 2  # for requests to end at shutdown
_HEAD_S = 30.0  # for the headers of a request to arrive
_MOST_CONNECTIONS = 4096
_ERRORS_SHOWN = 5  # of a body
Result = TypeVar("Result")
Refusal = Callable[[Scope, str], Response | None]
_STATUS: dict[type[Exception], int] = {
    RequestValidationError: 400, ValueError: 400, TypeError: 400, NoChannel: 409, BackendDied: 503, Exception: 500,
}  # fmt: skip
TokenIds = Annotated[list[NonNegativeInt], Field(min_length=1)]
_SENDING = ("/update_weights/", "/update_named_param/")  # the client waits to send


class _Connection(H11Protocol):
    """Closes a connection whose request has begun, or is the first one, and does not arrive in time."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        if not self._awaits_head():
            if self._limit is not None:
                self._limit.cancel()
            self._limit = None
        elif self._limit is None:
            self._limit = self.loop.call_later(_HEAD_S, self._give_up)

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _give_up(self) -> None:
        self._limit = None
        if self._awaits_head():
            self.transport.close()


class HTTPServer:
    """A server of an ASGI app that binds its address at once. Raises: OSError if it cannot be bound."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self._socket = socket.socket(resolved(host, port)[0], socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port = int(self._socket.getsockname()[1])
        self._running: uvicorn.Server | None = None
        self._ended = False

    def listen(self) -> None:
        """Accept connections, which wait for `run`. Raises: OSError if another program listens here."""
        self._socket.listen()

    def run(self, app: ASGIApp) -> None:
        """Answer requests until `shutdown` is called in another thread, or SIGTERM or SIGINT in the main one."""
        config = uvicorn.Config(
            app, http=_Connection, ws="none", limit_concurrency=_MOST_CONNECTIONS, lifespan="off", log_config=None,
            server_header=False, access_log=logger.isEnabledFor(logging.DEBUG), timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_ENDING_S,
        )  # fmt: skip
        self._running = uvicorn.Server(config)
        self._running.should_exit = self._ended
        self._running.run(sockets=[self._socket])

    def shutdown(self) -> None:
        self._ended = True
        if self._running is not None:
            self._running.should_exit = True

    def close(self) -> None:
        self._socket.close()


class GenerationServer(HTTPServer):
    """The server of `trl vllm-serve`, whose address is taken before the model is loaded."""

    died: BackendDied | None = None

    def serve(self, backend: VLLMBackend, *, token: str, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """Answer requests as `run` does. Raises: BackendDied if the backend has ended."""

        def refusal(scope: Scope, client_token: str) -> Response | None:
            scope["path"] = f"{scope['path'].rstrip('/')}/"
            if scope["path"] == "/health/" or hmac.compare_digest(client_token.encode("latin-1"), token.encode()):
                return None
            text = "The token is missing or wrong. Set TRL_VLLM_SERVER_TOKEN on both sides."
            return JSONResponse({"error": text}, 401, {"WWW-Authenticate": "Bearer"})

        self.run(admission(make_app(self, backend), refusal, most_bytes=max_body_bytes))
        if self.died is not None:
            raise self.died


def admission(app: ASGIApp, refusal: Refusal, *, most_bytes: int, seconds: float | None = None) -> ASGIApp:
    """Check a request before its body is parsed, by its size and by `refusal(scope, token)`, an answer or None.

    A body must arrive within `seconds`, and so must each part of an answer be read (None: no limit).
    """

    async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
        taken, started = 0, time.monotonic()

        async def receive_limited() -> Message:
            nonlocal taken
            if taken < 0:  # the body is there: what comes next is the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), seconds and started + seconds - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, f"The body did not arrive within {seconds:g} s.") from None
            taken += len(message.get("body", b""))
            if taken > most_bytes:
                raise HTTPException(413, f"The body has more than {most_bytes} bytes. Split it.")
            if not message.get("more_body", False):
                taken = -1
            return message

        async def send_timely(message: Message) -> None:
            await asyncio.wait_for(send(message), seconds)  # a client that does not read

        token = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
        if (answer := refusal(scope, token.decode("latin-1"))) is not None:
            await answer(scope, receive, send)
            return
        headers = [header for header in scope["headers"] if header[0] != b"content-type"]
        scope["headers"] = [*headers, (b"content-type", b"application/json")]  # clients may give another type
        await app(scope, receive_limited, send_timely)

    return admitted


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`. Raises: HTTPException if the client goes away before, or the server shuts down."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch, result = asyncio.ensure_future(gone()), asyncio.ensure_future(work)
    result.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # which no one may read
    try:
        await asyncio.wait({watch, result}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise HTTPException(499, "The client went away.")
        return result.result()
    except asyncio.CancelledError:
        raise HTTPException(503, "The server is shutting down.") from None
    finally:
        watch.cancel()
        result.cancel()


def faults_of(error: RequestValidationError) -> list[tuple[str, Json]]:
    """What is wrong in a body, each with the name of the field; "" for the body itself, also where it is not JSON."""
    return [
        ("" if fault["type"] == "json_invalid" else ".".join(map(str, fault["loc"][1:])), fault)
        for fault in error.errors()[:_ERRORS_SHOWN]
    ]


def make_app(server: GenerationServer, backend: VLLMBackend) -> FastAPI:
    """The endpoints, over a backend whose methods may be called in any thread."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.get("/health/")
    async def health() -> Json:
        backend.check()
        return {"status": "ok"}

    @app.get("/get_world_size/")
    async def get_world_size() -> Json:
        return {"world_size": backend.world_size}

    @app.get("/model/")
    async def model() -> Json:
        return backend.about() | {"channel": backend.channel}

    @app.post("/complete/")
    async def complete(request: Request, body: CompleteBody) -> JSONResponse:
        futures = [backend.submit(completion.model_dump()) for completion in body.requests]
        try:
            answers = await unless_gone(request, asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:  # nothing for those that ended
                future.cancel()
        return _completions({"completions": answers, "channel": backend.channel})

    @app.post("/generate/")
    async def generate(body: GenerateBody) -> JSONResponse:
        return _completions(await _called(lambda: backend.generate(body)))

    @app.post("/chat/")
    async def chat(body: ChatBody) -> JSONResponse:
        return _completions(await _called(lambda: backend.chat(body)))

    async def failed(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            text = f"{error.detail} ({request.method} {request.url.path})"
            return JSONResponse({"error": text}, error.status_code)
        status, text = next(status for kind, status in _STATUS.items() if isinstance(error, kind)), str(error)
        if isinstance(error, BackendDied):
            server.died = error
            server.shutdown()
        elif isinstance(error, RequestValidationError):
            text = "; ".join(f"{name or 'body'}: {fault['msg']}" for name, fault in faults_of(error))
        elif status == 500:  # which is logged
            text = f"{type(error).__name__}: {error}"
        if status == 400 and request.url.path in _SENDING:
            await _called(backend.leave)  # the client would wait for this server to receive
        return JSONResponse({"error": text}, status)

    for kind in (HTTPException, *_STATUS):
        app.add_exception_handler(kind, failed)
    add_weight_endpoints(app, server, backend)
    return app


def add_weight_endpoints(app: FastAPI, server: GenerationServer, backend: VLLMBackend) -> None:
    """The endpoints by which a client's weights replace the backend's."""

    @app.post("/init_communicator/")
    async def init_communicator(body: JoinBody) -> Json:
        if body.world_size != (size := backend.world_size + 1):
            raise ValueError(f"world_size must be {size}, all workers and the client, got {body.world_size}.")
        if body.port == server.port:
            raise ValueError(f"port {body.port} is this server's own. Choose another group_port.")
        address = {"host": server.host, "port": body.port}
        await _called(lambda: backend.join(**address, size=size, backend=body.backend, timeout_s=body.timeout_s))
        return {"status": "joined", "channel": backend.channel}

    @app.post("/update_weights/")
    async def update_weights(body: WeightsBody) -> Json:
        await _called(lambda: backend.load(body.weights, whole=True))
        return {"loaded": len(body.weights)}

    @app.post("/update_named_param/")
    async def update_named_param(body: WeightBody) -> Json:
        await _called(lambda: backend.load([body], whole=False))
        return {"loaded": 1}

    @app.post("/reset_prefix_cache/")
    async def reset_prefix_cache() -> Json:
        await _called(backend.reset_prefix_cache)
        return {"status": "ok"}

    @app.post("/close_communicator/")
    async def close_communicator(body: LeaveBody | None = None) -> Json:
        await _called(lambda: backend.leave(None if body is None else body.channel))
        return {"status": "ok"}


async def _called(function: Callable[[], Result]) -> Result:
    """The result of a long call, on a daemon thread, which does not delay shutdown."""
    return await asyncio.wrap_future(start(function, "vllm-server").future)


def _completions(answer: Json) -> JSONResponse:
    """Raises: FloatingPointError for log-probs that JSON cannot hold."""
    try:
        return JSONResponse(answer)
    except ValueError:
        raise FloatingPointError("log-probs are not finite. Check weights and --dtype.") from None


# ---- JSON bodies


class Body(BaseModel):
    """A JSON object without unknown fields and conversions ("2" is not 2)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class SamplingBody(Body):
    """Sampling arguments that `VLLMClient.generate` and `chat` share."""

    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    truncate_prompt_tokens: int | None = None
    guided_decoding_regex: str | None = None
    generation_kwargs: Json | None = None

    def sampling(self) -> Json:
        """Arguments of vLLM's `SamplingParams`; `generation_kwargs` take precedence."""
        names = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
        arguments = {name: getattr(self, name) for name in names}
        if self.guided_decoding_regex is not None:
            arguments["structured_outputs"] = {"regex": self.guided_decoding_regex}
        return arguments | (self.generation_kwargs or {})


class GenerateBody(SamplingBody):
    """`/generate/`: prompts as texts or token ids, each with an image, a list of images (base64) or None."""

    prompts: list[str | TokenIds]
    images: list[str | list[str] | None] | None = None

    @model_validator(mode="after")
    def _one_entry_each(self) -> "GenerateBody":
        if self.images is not None and len(self.images) != len(self.prompts):
            raise ValueError(f"images must be one per prompt ({len(self.prompts)}), got {len(self.images)}")
        return self

    def images_of(self, index: int) -> list[str]:
        images = None if self.images is None else self.images[index]
        return [] if images is None else [images] if isinstance(images, str) else images


class ChatBody(SamplingBody):
    """`/chat/`: conversations, with images (if any) within their messages."""

    messages: list[list[Json]]
    chat_template_kwargs: Json | None = None
    tools: list[object] | None = None
    chat_template: str | None = None

    @field_validator("messages")
    @classmethod
    def _with_images_inside(cls, messages: list[list[Json]]) -> list[list[Json]]:
        """Images become data URLs, because the server downloads nothing."""
        for message in (message for conversation in messages for message in conversation):
            if isinstance(message.get("content"), list):
                message["content"] = [_part(part) for part in message["content"]]
        return messages


class JoinBody(Body):
    """`/init_communicator/`: the address of the weight channel."""

    port: int = Field(gt=0, lt=65536)
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float = Field(240.0, gt=0)
    host: str | None = None  # the client's name for this machine; the server listens on its own address


class WeightBody(Body):
    """The description of one weight, in `/update_named_param/` and in the list of `/update_weights/`."""

    name: str
    dtype: str
    shape: list[NonNegativeInt]

    @field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"expected one of torch's dtypes, such as 'float32', got {dtype!r}")
        return dtype


class WeightsBody(Body):
    """`/update_weights/`: all weights of a checkpoint, in the order of sending."""

    weights: list[WeightBody]


class CompletionRequest(Body):
    """A prompt, with arguments of vLLM's `SamplingParams` for one completion."""

    prompt_ids: TokenIds
    sampling: Json = {}

    @field_validator("sampling")
    @classmethod
    def _only_one(cls, sampling: Json) -> Json:
        if sampling.get("n", 1) != 1:
            raise ValueError("n must be 1: send a request for each completion")
        return sampling


class CompleteBody(Body):
    """`/complete/`: a completion for each request."""

    requests: list[CompletionRequest]


class LeaveBody(Body):
    """`/close_communicator/`: the name of the channel to leave; None for any."""

    channel: str | None = None


def _part(part: object) -> object:
    if not isinstance(part, dict) or part.get("type") in ("text", None):
        return part
    content = part.get(part["type"])
    url = content.get("url") if isinstance(content, dict) else content
    if part["type"] == "image" and isinstance(url, str):
        url = f"data:image/png;base64,{url}"
    if part["type"] not in ("image", "image_url") or not isinstance(url, str) or not url.startswith("data:"):
        raise ValueError(f"parts of type {part['type']!r} must be text, or images as base64 or data URLs")
    return {"type": "image_url", "image_url": {"url": url}}
