"""What clients of a vLLM server may ask for, checked: JSON bodies as dataclasses. No vLLM is needed to read this."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

_Body = TypeVar("_Body")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "list": list,
    "dict": dict,
    "None": type(None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How completions are drawn: the arguments that `VLLMClient.generate` and `chat` share."""

    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    truncate_prompt_tokens: int | None = None
    guided_decoding_regex: str | None = None
    generation_kwargs: dict | None = None

    def sampling(self) -> dict[str, Any]:
        """These as arguments of vLLM's `SamplingParams`; `generation_kwargs` win."""
        names = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")
        found = {name: getattr(self, name) for name in names}
        if self.guided_decoding_regex is not None:
            found["structured_outputs"] = {"regex": self.guided_decoding_regex}
        return found | (self.generation_kwargs or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody(Drawing):
    """`/generate/`: prompts as texts or lists of token ids; for each an image, a list of images or None, as base64."""

    prompts: list
    images: list | None = None

    def __post_init__(self) -> None:
        for index, prompt in enumerate(self.prompts):
            if not (isinstance(prompt, str) or is_ids(prompt)):
                raise ValueError(
                    f"prompts[{index}] must be a text or a list of token ids, got {_short(prompt)}."
                )
        if self.images is not None and len(self.images) != len(self.prompts):
            raise ValueError(
                f"images must have one entry for each of {len(self.prompts)} prompts, got {len(self.images)}. Give None to a "
                "prompt without images."
            )

    def images_of(self, index: int) -> list[str]:
        """The images of one prompt, in base64."""
        found = None if self.images is None else self.images[index]
        return [] if found is None else [found] if isinstance(found, str) else list(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody(Drawing):
    """`/chat/`: conversations, with images (if any) within their messages."""

    messages: list
    chat_template_kwargs: dict | None = None
    tools: list | None = None
    chat_template: str | None = None

    def conversations(self) -> list[list[dict[str, Any]]]:
        """The conversations, one or several of them as given, with images in the only form in which vLLM shall read them.

        Raises: ValueError for an image that is not in the request itself: the server fetches nothing.
        """
        several = self.messages if all(isinstance(one, list) for one in self.messages) else [self.messages]
        return [[_message(message) for message in conversation] for conversation in several]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinBody:
    """`/init_communicator/`: where the weight channel's processes meet."""

    port: int
    world_size: int
    backend: str
    timeout_s: float = 240.0
    host: str | None = None  # what the client calls this machine; the server listens on its own address

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be from 1 to 65535, got {self.port}.")
        if self.backend not in ("gloo", "nccl"):
            raise ValueError(f"backend must be 'gloo' (CPU) or 'nccl' (GPU), got {self.backend!r}.")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be more than 0 seconds, got {self.timeout_s}.")

    @property
    def kind(self) -> Literal["gloo", "nccl"]:
        """The backend."""
        return "nccl" if self.backend == "nccl" else "gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBody:
    """One weight to come, as in `/update_named_param/` and in the list of `/update_weights/`."""

    name: str
    dtype: str
    shape: list

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(
                f"dtype of {self.name} must be one of torch's, such as 'float32', got {self.dtype!r}."
            )
        if not all(_is(size, "int") and size >= 0 for size in self.shape):
            raise ValueError(f"shape of {self.name} must be a list of sizes, got {_short(self.shape)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBody:
    """`/update_weights/`: all weights of a checkpoint, in the order in which they will be sent."""

    weights: list

    def entries(self) -> list[WeightBody]:
        """The weights, each checked."""
        return [read(WeightBody, weight) for weight in self.weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteBody:
    """`/complete/`: prompts as token ids, each with arguments of vLLM's `SamplingParams`; one completion for each."""

    requests: list

    def __post_init__(self) -> None:
        for index, request in enumerate(self.requests):
            if not isinstance(request, dict) or request.keys() - {"sampling"} != {"prompt_ids"}:
                raise ValueError(
                    f"requests[{index}] must have prompt_ids, and may have sampling: got {_short(request)}."
                )
            if not is_ids(request["prompt_ids"]):
                raise ValueError(
                    f"requests[{index}]: prompt_ids must be token ids, got {_short(request['prompt_ids'])}."
                )
            sampling = request.get("sampling", {})
            if not isinstance(sampling, dict) or sampling.get("n", 1) != 1:
                raise ValueError(
                    f"requests[{index}]: sampling must be an object without n, got {_short(sampling)}."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveBody:
    """`/close_communicator/`: the name of the channel to leave; None means whichever is open."""

    channel: str | None = None


@dataclass(frozen=True, slots=True)
class EmptyBody:
    """For requests that ask for no more than their address says."""


def read(kind: type[_Body], body: Any) -> _Body:
    """The body as a dataclass.

    Raises: ValueError for what is missing, unknown or of another JSON type.
    """
    if not isinstance(body, dict):
        raise ValueError(f"A JSON object is needed, got {_short(body)}.")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = body.keys() - fields.keys()
    if unknown:
        raise ValueError(f"Unknown: {', '.join(sorted(unknown))}. Known: {', '.join(fields)}.")
    for name, field in fields.items():
        if name not in body and field.default is dataclasses.MISSING:
            raise ValueError(f"{name} is missing.")
        wanted = str(field.type).split(" | ")
        if name in body and not any(_is(body[name], one) for one in wanted):
            raise ValueError(f"{name} must be {' or '.join(wanted)}, got {_short(body[name])}.")
    return kind(**body)


def is_ids(value: Any) -> bool:
    """Whether this is a list of at least one token id."""
    return (
        isinstance(value, list) and bool(value) and all(_is(token, "int") and token >= 0 for token in value)
    )


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind]) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(
            f"messages must be conversations, lists of messages with role and content: got {_short(message)}."
        )
    content = message.get("content")
    return (
        message if not isinstance(content, list) else message | {"content": [_part(part) for part in content]}
    )


def _part(part: Any) -> Any:
    """A part of a message; an image in it becomes a data URL."""
    if not isinstance(part, dict) or part.get("type") in ("text", None):
        return part
    if part["type"] == "image" and isinstance(part.get("image"), str):
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{part['image']}"}}
    url = part["image_url"].get("url") if isinstance(part.get("image_url"), dict) else part.get("image_url")
    if part["type"] == "image_url" and isinstance(url, str) and url.startswith("data:"):
        return {"type": "image_url", "image_url": {"url": url}}
    raise ValueError(
        f"Parts of a message must be text, or images as base64 or data URLs, got {_short(part)}. Send the image itself."
    )
