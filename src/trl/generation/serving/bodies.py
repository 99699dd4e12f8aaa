"""The JSON bodies that a vLLM server accepts, as pydantic models. vLLM is not needed to import this."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

TokenIds = Annotated[list[NonNegativeInt], Field(min_length=1)]


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
    generation_kwargs: dict[str, Any] | None = None

    def sampling(self) -> dict[str, Any]:
        """Arguments of vLLM's `SamplingParams`; `generation_kwargs` take precedence."""
        names = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
        found = {name: getattr(self, name) for name in names}
        if self.guided_decoding_regex is not None:
            found["structured_outputs"] = {"regex": self.guided_decoding_regex}
        return found | (self.generation_kwargs or {})


class GenerateBody(SamplingBody):
    """`/generate/`: prompts as texts or token ids, each with an image, a list of images (base64) or None."""

    prompts: list[str | TokenIds]
    images: list[str | list[str] | None] | None = None

    @model_validator(mode="after")
    def _one_entry_each(self) -> GenerateBody:
        if self.images is not None and len(self.images) != len(self.prompts):
            count = len(self.prompts)
            raise ValueError(
                f"images must have one entry for each of {count} prompts (or None), got {len(self.images)}"
            )
        return self

    def images_of(self, index: int) -> list[str]:
        """The images of one prompt, in base64."""
        found = None if self.images is None else self.images[index]
        return [] if found is None else [found] if isinstance(found, str) else found


class ChatBody(SamplingBody):
    """`/chat/`: conversations, with images (if any) within their messages."""

    messages: list[list[dict[str, Any]]]
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    chat_template: str | None = None

    @field_validator("messages")
    @classmethod
    def _with_images_inside(cls, messages: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
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
    """`/update_weights/`: all weights of a checkpoint, in the order in which they are sent."""

    weights: list[WeightBody]


class CompletionRequest(Body):
    """A prompt, with arguments of vLLM's `SamplingParams` for one completion."""

    prompt_ids: TokenIds
    sampling: dict[str, Any] = {}

    @field_validator("sampling")
    @classmethod
    def _only_one(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        if sampling.get("n", 1) != 1:
            raise ValueError("n must be 1: send a request for each completion")
        return sampling


class CompleteBody(Body):
    """`/complete/`: a completion for each request."""

    requests: list[CompletionRequest]


class LeaveBody(Body):
    """`/close_communicator/`: the name of the channel to leave; None for any."""

    channel: str | None = None


def _part(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") in ("text", None):
        return part
    given = part.get(part["type"])
    url = given.get("url") if isinstance(given, dict) else given
    if part["type"] == "image" and isinstance(url, str):
        url = f"data:image/png;base64,{url}"
    if part["type"] not in ("image", "image_url") or not isinstance(url, str) or not url.startswith("data:"):
        raise ValueError(f"parts of type {part['type']!r} must be text, or images as base64 or data URLs")
    return {"type": "image_url", "image_url": {"url": url}}
