"""The bodies of requests to the OpenAI-style API."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trl.generation.serving.answers import check_text
from trl.generation.serving.connection import Json

MOST_LOGPROBS = 256
Stop = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """A JSON object. Fields that are not named here are refused, unless they are null."""

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
    stream_options: Json | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    # without effect
    user: str | None = None
    metadata: Json | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: object) -> object:
        is_object = isinstance(body, dict)
        return {name: value for name, value in body.items() if value is not None} if is_object else body

    @model_validator(mode="after")
    def _is_unicode(self) -> Self:
        check_text(self.model_dump())
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(Body):
    """`/v1/chat/completions`."""

    messages: list[Json] = Field(min_length=1)
    tools: list[Json] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: Json | None = None

    @field_validator("tool_choice", "response_format", mode="before")
    @classmethod
    def _is_unconstrained(cls, form: object) -> object:
        if form not in ("auto", "none", {"type": "text"}):
            raise ValueError(f"{form!r:.200} needs constrained decoding, which is not available. Leave it out")
        return form


class CompletionBody(Body):
    """`/v1/completions`; prompts are texts or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    return_tokens_as_token_ids: bool = False
    best_of: Literal[1] | None = None

    @property
    def scored(self) -> int | None:
        """How many log-probs of each of the prompt's tokens are wanted; None for none."""
        return (self.logprobs or 0) if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @model_validator(mode="after")
    def _scores_alone(self) -> "CompletionBody":
        if self.scored is None and (self.max_tokens == 0 or (self.logprobs or 0) > 1):
            raise ValueError("max_tokens=0 and more than 1 of logprobs need echo or prompt_logprobs")
        if self.logprobs and self.max_tokens != 0 and self.temperature != 0:
            raise ValueError("logprobs gives only sampled tokens without temperature=0. Use logprobs=0")
        if self.scored is not None and (self.n > 1 or self.stream):
            raise ValueError("n and stream cannot be combined with echo and prompt_logprobs")
        return self
