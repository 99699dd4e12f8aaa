"""The embedded engine: rollouts from the model that is trained, in the process that trains it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trl.generation.engine import Generated, Sampling, check_requests
from trl.generation.transformers.attention import rollout_attention_of
from trl.generation.transformers.cache import RolloutCache
from trl.generation.transformers.choosing import Processors
from trl.generation.transformers.decoders import FusedDecoder, OwnForward, fused_unsupported_reason
from trl.generation.transformers.model_generate import MoreInputs, generate_with_model
from trl.generation.transformers.phase import generating
from trl.generation.transformers.requests import Requests, fresh_seed
from trl.generation.transformers.rollout_loop import RolloutLoop, bytes_per_row, default_rows
from trl.generation.transformers.stopping import StopStrings, end_tokens
from trl.models.distributed import is_sharded
from trl.models.packed.attention import packed_unsupported
from trl.models.parts import (
    causal_core,
    embedded_tokens,
    head_unsupported,
    logit_rule,
    prompt_learning_unsupported,
)

logger = logging.getLogger(__name__)

MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
Route = Literal["auto", "fused", "forward", "generate"]


class TransformersEngine:
    """Completions from a transformers model as it is: plain, with PEFT adapters, a value head, or sharded.

    `route`: `"fused"` is a decode step of our own (Llama, Qwen2, Qwen3, Mistral), `"forward"` the model's own
    forward over our cache, `"generate"` the model's `generate`; `"auto"` takes the first that the model can
    take, and `fallbacks` says why not an earlier one. `max_batch` rows are decoded at once (default: what 2
    GiB on a CPU or half of a GPU's free memory holds). `autocast_dtype` defaults to that of the autocast
    context in which `generate` is called, else to the mixed precision of the `accelerator`.
    `gather_zero3=False` (`ds3_gather_for_generation`) leaves ZeRO-3 weights sharded, which only `"generate"`
    can do; then all ranks must ask for equally many requests.

    Example:
        >>> engine = TransformersEngine(model, tokenizer=tokenizer)  # doctest: +SKIP
        >>> engine.generate([[5, 6, 7]] * 8, Sampling(max_new_tokens=64, seed=0))[0].ids  # doctest: +SKIP
    """

    exact = True

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any | None = None,
        accelerator: Any | None = None,
        route: Route = "auto",
        max_batch: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        gather_zero3: bool = True,
    ) -> None:
        if max_batch is not None and max_batch < 1:
            raise ValueError(
                f"max_batch must be at least 1, got {max_batch}. Use None to choose it by memory."
            )
        if route not in ("auto", "fused", "forward", "generate"):
            raise ValueError(f"route must be auto, fused, forward or generate, got {route!r}. Use 'auto'.")
        self.model, self.tokenizer, self.accelerator = model, tokenizer, accelerator
        self.route: Route = route
        self.max_batch, self.autocast_dtype, self.gather_zero3 = max_batch, autocast_dtype, gather_zero3
        self.fallbacks: list[str] = []
        self.step = 0
        self._strings: StopStrings | None = None
        self._warned: set[str] = set()
        self._looked_at: tuple[Any, str | None] | None = None  # a model, and why it cannot run over our cache

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        streams: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        more_inputs: MoreInputs | None = None,
        listener: Callable[[Tensor, Tensor], None] | None = None,
    ) -> list[Generated]:
        """One completion per prompt, in order; see `Engine.generate`. With `more_inputs` the route is `"generate"`.

        `listener(requests, ids)`, both `(R,)`, is called with the newest token of each request that got one.
        Sampled ids depend on prompt, seed and stream alone; in float32 up to draws that fall on a rounding
        error.

        Raises: ValueError for prompts that cannot be completed, FloatingPointError for logits that are no
        numbers.
        """
        dtype = self._dtype()
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        with generating(self.model, self.accelerator, gather_zero3=self.gather_zero3) as model:
            core = causal_core(model)
            context_length = context_length_of(model)
            found, names = check_requests(
                prompts,
                streams,
                context_length=context_length,
                vocabulary=embedded_tokens(core),
                room=0 if _begin(core) else 1,
            )
            if not found:
                return []
            requests = self._requests(core, found, names, sampling, context_length, seed, limits)
            requests.listener = listener
            with _autocast(core.device.type, dtype):
                self._run(model, core, requests, dtype, more_inputs)
        return requests.results()

    @property
    def together(self) -> bool:
        """Whether other processes hold parts of the weights, which are gathered for each call."""
        return is_sharded(self.model)

    def sync_weights(self, model: nn.Module, step: int) -> None:
        """Generate from `model` from now on; its weights are read anew at the start of each `generate`."""
        self.model, self.step = model, step

    def close(self) -> None:
        """Nothing is held between calls."""
        self._strings = None

    def _dtype(self) -> torch.dtype | None:
        first = next(self.model.parameters())
        if first.dtype == torch.float64 or self.autocast_dtype is not None:
            return None if first.dtype == torch.float64 else self.autocast_dtype
        if torch.is_autocast_enabled(first.device.type):
            return torch.get_autocast_dtype(first.device.type)
        return MIXED.get(getattr(self.accelerator, "mixed_precision", "no"))

    def _requests(
        self,
        core: Any,
        prompts: list[tuple[int, ...]],
        streams: list[int],
        sampling: Sampling,
        context_length: int | None,
        seed: int,
        limits: Sequence[int] | None,
    ) -> Requests:
        ends = end_tokens(sampling.stop_token_ids, core)
        if not ends and not sampling.stop_strings and sampling.stop_token_ids is None:
            self._warn(
                "The model has no end token and there are no stop tokens or strings, so every completion "
                "has its full length. Set eos_token_id in its generation config, or Sampling.stop_token_ids."
            )
        return Requests(
            prompts, streams, replace(sampling, seed=seed), context_length=context_length, ends=ends,
            strings=self._stop_strings(sampling, core), device=core.device, begin=_begin(core), limits=limits,
            processors=Processors(core, sampling, ends) if sampling.processors else None,
        )  # fmt: skip

    def _stop_strings(self, sampling: Sampling, core: Any) -> StopStrings | None:
        if not sampling.stop_strings:
            return None
        if self._strings is None or self._strings.texts != sampling.stop_strings:
            self._strings = StopStrings(sampling.stop_strings, self.tokenizer, embedded_tokens(core))
        return self._strings

    def _run(
        self,
        model: Any,
        core: Any,
        requests: Requests,
        dtype: torch.dtype | None,
        more_inputs: MoreInputs | None,
    ) -> None:
        route = "generate" if more_inputs is not None else self._route(model, core)
        item = (dtype or core.dtype).itemsize
        share = sum(map(len, requests.prompts)), len(requests.prompt_of)
        config = core.config.get_text_config()
        row = bytes_per_row(config, requests.longest, item, share)
        rows = self.max_batch or default_rows(row, core.device)
        if route == "generate":
            synced = not self.gather_zero3 and is_sharded(model)
            pad = _pad(core, self.tokenizer)
            generate_with_model(
                model, requests, max_rows=rows, pad=pad, synced=synced, more_inputs=more_inputs
            )
            return
        cache = RolloutCache(config.num_hidden_layers)
        with rollout_attention_of(core, cache):
            decoder = FusedDecoder(core, cache, dtype=dtype) if route == "fused" else OwnForward(core, cache)
            RolloutLoop(decoder, cache, requests, max_rows=rows).run()

    def _route(self, model: Any, core: Any) -> Route:
        """The first route that this model can take, or the one that was asked for.

        Raises: ValueError where the model cannot take the route that was asked for.
        """
        if self.route == "generate":
            return "generate"
        if self._looked_at is None or self._looked_at[0] is not core:
            self._looked_at = core, forward_unsupported_reason(model, core)
        unsupported = self._looked_at[1]
        if unsupported is None and is_sharded(core) and not self.gather_zero3:
            unsupported = "its weights stay sharded"
        own = unsupported or fused_unsupported_reason(core)
        for route, reason in (("fused", own), ("forward", unsupported)):
            if reason is None and self.route in ("auto", route):
                return route  # pyright: ignore[reportReturnType]
            if reason is not None and self.route == route:
                raise ValueError(f"route={route!r} needs another model: {reason}. Use route='auto'.")
            if reason is not None and reason not in self.fallbacks:
                self.fallbacks.append(reason)
        self._warn(f"{type(core).__name__} generates with its own `generate`, because {unsupported}.")
        return "generate"

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def forward_unsupported_reason(model: Any, core: Any) -> str | None:
    """Why a model's own forward cannot run over our cache, in words; None where it can."""
    unsupported = packed_unsupported(core) if not getattr(core.config, "is_encoder_decoder", False) else None
    if getattr(core.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if len(set((getattr(core, "hf_device_map", None) or {}).values())) > 1:
        return "its layers are on several devices"
    return (
        unsupported or prompt_learning_unsupported(model) or head_unsupported(core, logit_rule(core.config))
    )


def context_length_of(model: Any, at_most: int | None = None) -> int | None:
    """The most tokens that a model has positions for beside virtual ones, or `at_most`; None where neither says.

    A decoder's hold prompt and completion, an encoder-decoder has as many for each.
    """
    config = causal_core(model).config
    config = config if getattr(config, "is_encoder_decoder", False) else config.get_text_config()
    context_length = getattr(config, "max_position_embeddings", None)
    if context_length is not None and prompt_learning_unsupported(model) is not None:
        context_length -= getattr(model.active_peft_config, "num_virtual_tokens", None) or 0
    return min((each for each in (context_length, at_most) if each is not None), default=None)


def _pad(core: Any, tokenizer: Any | None) -> int:
    """A token for places that nobody looks at."""
    own = core.config.get_text_config().pad_token_id
    other = getattr(tokenizer, "pad_token_id", None)
    return int(own if own is not None else other if other is not None else 0)


def _begin(core: Any) -> list[int] | None:
    """The tokens that an encoder-decoder's completions go on from; None for a decoder."""
    return (
        [core.config.decoder_start_token_id or 0]
        if getattr(core.config, "is_encoder_decoder", False)
        else None
    )


def _autocast(device: str, dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)
