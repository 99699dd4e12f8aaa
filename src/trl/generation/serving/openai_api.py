"""The OpenAI-style API: chat completions and completions over sessions, as JSON or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trl.generation.serving.answers import APIError, ScoredPrompt

MOST_LOGPROBS = 256
MAX_BODY_BYTES = 16 * 1024**2
BODY_DEADLINE_S = 30.0  # for a whole request to arrive
MOST_HEADERS = 100
_ERRORS_SHOWN = 5
Found = TypeVar("Found")
Stop = Annotated[str, Field(min_length=1)]


class Written(Protocol):
    """A completion: its text or message, its tokens' log-probs, and the numbers of tokens."""

    @property
    def text(self) -> str: ...
    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def logprobs(self) -> Sequence[tuple[str, float]]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def prompt(self) -> ScoredPrompt | None: ...


class Turn(Protocol):
    """A completion in progress. `deltas` are the parts of its text as they come; `result` ends with it."""

    def deltas(self) -> AsyncIterator[str]: ...

    async def result(self) -> Written: ...

    def cancel(self) -> None: ...


class Session(Protocol):
    """What one API key may do."""

    async def chat(self, body: ChatBody, *, is_retry: bool) -> Sequence[Turn]:
        """Begin `n` answers. Raises: APIError."""
        ...

    async def complete(self, body: CompletionBody, *, is_retry: bool) -> Sequence[Turn]:
        """Begin `n` completions of each prompt. Raises: APIError."""
        ...


class Service(Protocol):
    """Sessions by their key; `model_name` is that of the only model."""

    model_name: str

    @property
    def failure(self) -> Exception | None:
        """The error that ended the engine."""
        ...

    def session_of(self, key: str) -> Session | None:
        """The session of a key; None for an unknown one."""
        ...


# ---- Bodies


class Body(BaseModel):
    """A JSON object. Fields that are not named here are refused."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Stop | list[Stop] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    # without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _is_unicode(self) -> Self:
        json.dumps(self.model_dump(), ensure_ascii=False).encode()  # fails for halves of surrogate pairs
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(Body):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None


class CompletionBody(Body):
    """`/v1/completions`; prompts are texts or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    return_tokens_as_token_ids: bool = False
    suffix: None = None
    best_of: Literal[1] | None = None

    @property
    def scored(self) -> int | None:
        """How many log-probs of each of the prompt's tokens are wanted; None for none."""
        return (self.logprobs or 0) if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @model_validator(mode="after")
    def _scores_alone(self) -> CompletionBody:
        if self.scored is None and (self.max_tokens == 0 or (self.logprobs or 0) > 1):
            raise ValueError("max_tokens=0 and more than 1 of logprobs need echo or prompt_logprobs")
        if self.logprobs and self.max_tokens != 0 and self.temperature != 0:
            raise ValueError("logprobs gives only sampled tokens without temperature=0. Use logprobs=0")
        if self.scored is not None and (self.n > 1 or self.stream):
            raise ValueError("n and stream cannot be combined with echo and prompt_logprobs")
        return self


# ---- The app


def openai_app(service: Service) -> ASGIApp:
    """The endpoints `/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/health`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    card = {"object": "model", "created": int(time.time()), "owned_by": "trl"}

    @app.get("/health")
    async def health() -> Any:
        if service.failure is not None:
            raise APIError(
                503, f"The engine has ended ({type(service.failure).__name__}: {service.failure})."
            )
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [card | {"id": service.model_name}]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        _check_model(service, name)
        return card | {"id": name}

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Any:
        turns = await _session(service, request, body).chat(body, is_retry=_is_retry(request))
        return await _answered(request, turns, body, _Chat(service.model_name, body))

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionBody) -> Any:
        turns = await _session(service, request, body).complete(body, is_retry=_is_retry(request))
        return await _answered(request, turns, body, _Text(service.model_name, body))

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return _answer(_error_of(error, f"{request.method} {request.url.path}"))

    for kind in (APIError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, failed)
    return _admission(app, service)


def _answer(error: APIError) -> JSONResponse:
    return JSONResponse({"error": error.body()}, error.status)


def _error_of(error: Exception, where: str) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return APIError(error.status_code, f"{error.detail} ({where})")
    if isinstance(error, RequestValidationError):
        faults = [(".".join(str(part) for part in each["loc"][1:]), each) for each in error.errors()]
        parts = [
            f"{name} is not supported"
            if each["type"] == "extra_forbidden"
            else f"{name or 'body'}: {each['msg']}"
            for name, each in faults
        ]
        return APIError(400, "; ".join(parts[:_ERRORS_SHOWN]), param=faults[0][0].split(".")[0] or None)
    return APIError(500, f"{type(error).__name__}: {error}")


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, service.model_name):
        text = f"The model {name!r} does not exist, the only one is {service.model_name!r}."
        raise APIError(404, text, code="model_not_found", param="model")


def _session(service: Service, request: Request, body: Body) -> Session:
    _check_model(service, body.model)
    return request.scope["session"]


def _is_retry(request: Request) -> bool:
    """Whether the client sends this request again (the header of OpenAI's clients)."""
    return request.headers.get("x-stainless-retry-count", "0") != "0"


def _admission(app: ASGIApp, service: Service) -> ASGIApp:
    """Check the key, the number of headers and the size of a request before its body is parsed; bodies must arrive in time."""

    async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
        taken, until = 0, time.monotonic() + BODY_DEADLINE_S

        async def receive_limited() -> Message:
            nonlocal taken
            if taken < 0:  # the body is there: what comes next is the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, f"The body did not arrive within {BODY_DEADLINE_S:g} s.") from None
            taken += len(message.get("body", b""))
            if taken > MAX_BODY_BYTES:
                raise HTTPException(413, f"The body has more than {MAX_BODY_BYTES} bytes.")
            if not message.get("more_body", False):
                taken = -1
            return message

        async def send_timely(message: Message) -> None:
            await asyncio.wait_for(send(message), BODY_DEADLINE_S)  # a client that does not read

        given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
        if scope["path"] != "/health":
            scope["session"] = service.session_of(given.decode("latin-1"))
            if scope["session"] is None:
                text = "The API key is missing, unknown, or that of a session that has ended."
                await _answer(APIError(401, text, code="invalid_api_key"))(scope, receive, send)
                return
        if len(scope["headers"]) > MOST_HEADERS:
            await _answer(APIError(431, f"More than {MOST_HEADERS} headers."))(scope, receive, send)
            return
        headers = [each for each in scope["headers"] if each[0] != b"content-type"]
        scope = {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
        await app(scope, receive_limited, send_timely)

    return admitted


async def _answered(request: Request, turns: Sequence[Turn], body: Body, form: _Form) -> Any:
    """The response: JSON, or a stream of events. A client that goes away takes its requests along."""
    if body.stream:
        return _Stream(_events(turns, body, form), media_type="text/event-stream")
    try:
        return JSONResponse(form.whole(await unless_gone(request, _results(turns))))
    finally:
        for turn in turns:  # nothing for those that ended
            turn.cancel()


class _Stream(StreamingResponse):
    """Events, which also end where the client goes away or does not read while one is sent."""

    body_iterator: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def _results(turns: Sequence[Turn]) -> list[Written]:
    return [await turn.result() for turn in turns]


async def unless_gone(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """What `work` returns. Raises: HTTPException if the client closes its connection before, or the server shuts down."""
    watch, found = asyncio.ensure_future(_gone(request)), asyncio.ensure_future(work)
    found.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # which no one may read
    try:
        await asyncio.wait({watch, found}, return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            raise HTTPException(499, "The client went away.")
        return found.result()
    except asyncio.CancelledError:
        raise HTTPException(503, "The server is shutting down.") from None
    finally:
        watch.cancel()
        found.cancel()


async def _gone(request: Request) -> None:
    """Ends when the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(turns: Sequence[Turn], body: Body, form: _Form) -> AsyncIterator[str]:
    found: list[Written] = []
    try:
        for index, turn in enumerate(turns):
            yield _event(form.first(index))
            async for delta in turn.deltas():
                yield _event(form.delta(index, delta))
            found.append(await turn.result())
            for chunk in form.last(index, found[-1]):
                yield _event(chunk)
        if body.wants_usage:
            yield _event(form.chunk([]) | {"usage": usage(found, body.n)})
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event({"error": _error_of(error, "stream").body()})
    finally:
        for turn in turns:  # of a client that went away; nothing for those that ended
            turn.cancel()


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def usage(found: Sequence[Written], n: int) -> dict[str, int]:
    """The numbers of tokens; a prompt with its `n` completions counts once."""
    prompt = sum(one.prompt_tokens for one in found[::n])
    completion = sum(one.completion_tokens for one in found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class _Form:
    """The JSON of a kind of completion."""

    kind: str

    def __init__(self, model: str, body: Any) -> None:
        self.body = body
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    prefix = ""

    def whole(self, found: Sequence[Written]) -> dict[str, Any]:
        """A response."""
        choices = [{"index": index, **self.choice(one)} for index, one in enumerate(found)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage(found, self.body.n)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An event of a stream."""
        return {**self.head, "object": f"{self.kind}{self.suffix}", "choices": choices}

    suffix = ""

    def choice(self, written: Written) -> dict[str, Any]: ...

    def first(self, index: int) -> dict[str, Any]: ...

    def delta(self, index: int, text: str) -> dict[str, Any]: ...

    def last(self, index: int, written: Written) -> list[dict[str, Any]]: ...


class _Chat(_Form):
    kind, prefix, suffix = "chat.completion", "chatcmpl", ".chunk"

    def choice(self, written: Written) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": written.text or None, "refusal": None}
        if written.tool_calls:
            message["tool_calls"] = list(written.tool_calls)
        elif message["content"] is None:
            message["content"] = ""
        return {
            "message": message,
            "finish_reason": written.finish_reason,
            "logprobs": self._logprobs(written),
        }

    def _logprobs(self, written: Written) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        content = [
            {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logp in written.logprobs
        ]
        return {"content": content, "refusal": None}

    def first(self, index: int) -> dict[str, Any]:
        return self._of(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, text: str) -> dict[str, Any]:
        return self._of(index, {"content": text})

    def last(self, index: int, written: Written) -> list[dict[str, Any]]:
        calls = [{"index": number, **call} for number, call in enumerate(written.tool_calls)]
        found = [self._of(index, {"tool_calls": calls})] if calls else []
        end = self._of(index, {})
        end["choices"][0] |= {"finish_reason": written.finish_reason, "logprobs": self._logprobs(written)}
        return [*found, end]

    def _of(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return self.chunk([{"index": index, "delta": delta, "finish_reason": None, "logprobs": None}])


class _Text(_Form):
    kind, prefix, suffix = "text_completion", "cmpl", ""

    def choice(self, written: Written) -> dict[str, Any]:
        shown = written.prompt.text if written.prompt is not None and self.body.echo else ""
        found = {
            "text": shown + written.text,
            "finish_reason": written.finish_reason,
            "logprobs": self._logprobs(written),
        }
        if written.prompt is not None and self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = written.prompt.in_vllms_form()
        return found

    def _logprobs(self, written: Written) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        found: list[Any] = [(text, logp, {text: logp}) for text, logp in written.logprobs]
        if written.prompt is not None and self.body.echo:
            found = [*written.prompt.tokens(), *found]
        texts = [text for text, _, _ in found]
        return {
            "tokens": texts,
            "token_logprobs": [logp for _, logp, _ in found],
            "top_logprobs": [best for _, _, best in found] if self.body.logprobs else None,
            "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        }

    def first(self, index: int) -> dict[str, Any]:
        return self.delta(index, "")

    def delta(self, index: int, text: str) -> dict[str, Any]:
        return self.chunk([{"index": index, "text": text, "finish_reason": None, "logprobs": None}])

    def last(self, index: int, written: Written) -> list[dict[str, Any]]:
        end = self.delta(index, "")
        end["choices"][0] |= {"finish_reason": written.finish_reason, "logprobs": self._logprobs(written)}
        return [end]
