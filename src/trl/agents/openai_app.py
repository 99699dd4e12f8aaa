"""The OpenAI-style API: chat completions and completions over sessions, as JSON or as a stream of events."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from trl.agents.sessions import Session, Turn
from trl.data.rendering import Fields, Json
from trl.generation.serving.answers import APIError
from trl.generation.serving.app import admission, faults_of, unless_gone
from trl.generation.serving.openai_api import Body, ChatBody, CompletionBody

MAX_BODY_BYTES = 16 * 1024**2
BODY_DEADLINE_S = 30.0  # for a whole request to arrive, and for a client to read
MOST_HEADERS = 100


def openai_app(
    model_name: str, session_of: Callable[[str], Session | None], failure: Callable[[], Exception | None]
) -> ASGIApp:
    """The OpenAI-style endpoints over sessions by key, under any model name; `failure` is the engine's error."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    card = {"object": "model", "created": int(time.time()), "owned_by": "trl"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        if (error := failure()) is not None:
            raise APIError(503, f"The engine has ended ({type(error).__name__}: {error}).")
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [card | {"id": model_name}]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        return card | {"id": name}

    async def answered(request: Request, body: Body, begin: Callable[..., Awaitable[list[Turn]]]) -> Response:
        """JSON, or a stream of events. A client that goes away takes its turns along."""
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"  # of OpenAI's clients
        turns, form = await begin(body, is_retry=is_retry), _Form(body.model or model_name, body)
        if body.stream:
            return _Stream(_events(turns, form), media_type="text/event-stream")
        try:
            return JSONResponse(form.whole(await unless_gone(request, _results(turns))))
        finally:
            for turn in turns:  # nothing for those that ended
                turn.cancel()

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        return await answered(request, body, request.scope["session"].chat)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionBody) -> Response:
        return await answered(request, body, request.scope["session"].complete)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return _answer(_error_of(error, f"{request.method} {request.url.path}"))

    for kind in (APIError, HTTPException, RequestValidationError, RecursionError, Exception):
        app.add_exception_handler(kind, failed)

    def refusal(scope: Scope, key: str) -> JSONResponse | None:
        if scope["path"] != "/health":
            scope["session"] = session_of(key)
            if scope["session"] is None:
                text = "The API key is missing, unknown, or that of a session that has ended."
                return _answer(APIError(401, text, code="invalid_api_key"))
        if len(scope["headers"]) > MOST_HEADERS:
            return _answer(APIError(431, f"More than {MOST_HEADERS} headers."))
        return None

    return admission(app, refusal, most_bytes=MAX_BODY_BYTES, seconds=BODY_DEADLINE_S)


def _answer(error: APIError) -> JSONResponse:
    return JSONResponse({"error": error.body()}, error.status)


def _error_of(error: Exception, where: str) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return APIError(error.status_code, f"{error.detail} ({where})")
    if isinstance(error, RequestValidationError):
        faults, parts = faults_of(error), []
        for name, fault in faults:
            wrong = f"{name or 'body'}: {fault['msg'].removeprefix('Value error, ')}"
            parts.append(f"{name} is not supported" if fault["type"] == "extra_forbidden" else wrong)
        return APIError(400, "; ".join(parts), param=faults[0][0].split(".")[0] or None)
    if isinstance(error, RecursionError):
        return APIError(400, "The body is nested too deeply.")
    return APIError(500, f"{type(error).__name__}: {error}")


async def _results(turns: Sequence[Turn]) -> list[Turn]:
    return [await turn.result() for turn in turns]


class _Stream(StreamingResponse):
    """Events, which also end where the client goes away or does not read while one is sent."""

    body_iterator: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def _events(turns: Sequence[Turn], form: "_Form") -> AsyncIterator[str]:
    try:
        for index, turn in enumerate(turns):
            yield form.part(index, {"role": "assistant", "content": ""})
            async for text in turn.deltas():
                yield form.part(index, {"content": text})
            await turn.result()
            if calls := [{"index": number, **call} for number, call in enumerate(turn.tool_calls)]:
                yield form.part(index, {"tool_calls": calls})
            yield form.part(index, {}, form.end(turn))
        if (form.body.stream_options or {}).get("include_usage"):
            yield form.event([], usage=form.usage(turns))
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event({"error": _error_of(error, "stream").body()})
    finally:
        for turn in turns:  # of a client that went away; nothing for those that ended
            turn.cancel()


def _event(chunk: Fields) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


class _Form:
    """The JSON of the completions of a body, whole or in parts."""

    def __init__(self, model: str, body: Body) -> None:
        self.body: Any = body
        self.is_chat = isinstance(body, ChatBody)
        kind, prefix = ("chat.completion", "chatcmpl") if self.is_chat else ("text_completion", "cmpl")
        name = f"{prefix}-{secrets.token_hex(12)}"
        self.head = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, turns: Sequence[Turn]) -> Json:
        content = self._message if self.is_chat else self._text
        choices = [{"index": n, **content(turn), **self.end(turn)} for n, turn in enumerate(turns)]
        return {**self.head, "choices": choices, "usage": self.usage(turns)}

    def part(self, index: int, delta: Fields, end: Fields | None = None) -> str:
        new = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        return self.event([{"index": index, **new, **(end or {"finish_reason": None, "logprobs": None})}])

    def event(self, choices: list[Json], **more: object) -> str:
        kind = "chat.completion.chunk" if self.is_chat else self.head["object"]
        return _event({**self.head, "object": kind, "choices": choices, **more})

    def end(self, turn: Turn) -> Json:
        logprobs = self._chat_logprobs if self.is_chat else self._text_logprobs
        return {"finish_reason": turn.finish_reason, "logprobs": logprobs(turn)}

    def usage(self, turns: Sequence[Turn]) -> dict[str, int]:
        """The numbers of tokens; a prompt with its `n` completions counts once."""
        prompt = sum(len(turn.context) for turn in turns[:: self.body.n])
        written = sum(turn.completion_tokens for turn in turns)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _message(self, turn: Turn) -> Json:
        calls = {"tool_calls": turn.tool_calls} if turn.tool_calls else {}
        content = turn.text or (None if calls else "")
        return {"message": {"role": "assistant", "content": content, "refusal": None, **calls}}

    def _text(self, turn: Turn) -> Json:
        shown = turn.prompt.text if turn.prompt is not None and self.body.echo else ""
        choice: Json = {"text": shown + turn.text}
        if turn.prompt is not None and self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = turn.prompt.in_vllms_form()
        return choice

    def _chat_logprobs(self, turn: Turn) -> Json | None:
        if not self.body.logprobs:
            return None
        token_bytes = turn.session.chats.token_bytes(turn.generated.ids if turn.generated else [])
        content = [
            {"token": text, "logprob": logp, "bytes": of_token, "top_logprobs": []}
            for (text, logp), of_token in zip(turn.logprobs, token_bytes, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, turn: Turn) -> Json | None:
        if self.body.logprobs is None:
            return None
        scored: list[Any] = [(text, logp, {text: logp}) for text, logp in turn.logprobs]
        if turn.prompt is not None and self.body.echo:
            scored = [*turn.prompt.tokens(), *scored]
        texts, logps, best = (list(column) for column in zip(*scored, strict=True)) if scored else ([], [], [])
        return {
            "tokens": texts,
            "token_logprobs": logps,
            "top_logprobs": best if self.body.logprobs else None,
            "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        }
