"""Responses to queries, in the form that the step-level trainer returns them: token ids, with or without the query."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trl.data.step_inputs import TokenLimits
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine, generating
from trl.generation.transformers.requests import end_tokens, fresh_seed
from trl.models.parts import causal_core
from trl.tensors.padding import pad

# Defaults of transformers, under the model's generation config and the arguments of the call.
_DEFAULTS = {"max_length": 20, "do_sample": False, "top_k": 50}


class Responder:
    """Generates from one model: by the engine where it supports the arguments, else by the model's `generate`."""

    def __init__(self, model: nn.Module, *, accelerator: Any, tokenizer: Any, limits: TokenLimits) -> None:
        self.model, self.accelerator, self.limits = model, accelerator, limits
        self.pad: int = getattr(tokenizer, "pad_token_id", None) or 0
        self.engine = TransformersEngine(model, tokenizer=tokenizer, accelerator=accelerator)

    def respond(
        self,
        queries: Sequence[Tensor],
        generation_kwargs: dict[str, Any],
        *,
        length_sampler: Callable[[], int] | None,
        batch_size: int,
        return_prompt: bool,
    ) -> list[Tensor]:
        """One 1-D tensor of token ids per query, up to and with the token that ended it."""
        lengths = None if length_sampler is None else [int(length_sampler()) for _ in queries]
        kwargs = _without_config(generation_kwargs)
        if lengths is not None:
            kwargs = {**kwargs, "max_new_tokens": max(lengths)}
            kwargs.pop("max_length", None)
        sampling = self._sampling(kwargs)
        if sampling is None:
            found = self._by_model(queries, kwargs, batch_size)
        else:
            first = self.accelerator.process_index * len(queries)
            streams = range(first, first + len(queries))
            prompts = [query.tolist() for query in queries]
            found = [done.ids for done in self.engine.generate(prompts, sampling, streams=streams)]
        responses = []
        for row, (query, ids) in enumerate(zip(queries, found, strict=True)):
            response = query.new_tensor(ids if lengths is None else ids[: lengths[row]])
            if self.limits.start is not None:  # as `generate` of an encoder-decoder: never the query
                response = torch.cat([query.new_tensor([self.limits.start]), response])
            elif return_prompt:
                response = torch.cat([query, response])
            responses.append(response)
        return responses

    def _sampling(self, kwargs: dict[str, Any]) -> Sampling | None:
        """The engine's settings for these arguments over the model's generation config; None where it has none."""
        model: Any = self.accelerator.unwrap_model(self.model)
        core: Any = causal_core(getattr(model, "pretrained_model", model))
        given = {**_DEFAULTS, **_set_fields(core.generation_config), **kwargs}
        if "max_new_tokens" in given and "max_length" not in kwargs:
            given.pop("max_length")
        try:
            return Sampling().updated(given)
        except ValueError:
            return None  # beams, constraints: for the model's own generate, which checks names itself

    def _by_model(
        self, queries: Sequence[Tensor], kwargs: dict[str, Any], batch_size: int
    ) -> list[list[int]]:
        found: list[list[int]] = []
        is_decoder, window, device = (
            self.limits.start is None,
            self.limits.context_length,
            self.accelerator.device,
        )
        settings = {"pad_token_id": self.pad, **kwargs}
        seed = fresh_seed() + self.accelerator.process_index  # random streams are put back behind the block
        with generating(self.model, self.accelerator) as model:
            torch.manual_seed(seed)
            ends = kwargs.get("eos_token_id")
            ends = end_tokens(None, causal_core(model)) if ends is None else ends
            ends = ends if isinstance(ends, Collection) else [ends]
            for begin in range(0, len(queries), batch_size):
                part, side = queries[begin : begin + batch_size], "left" if is_decoder else "right"
                ids = pad([*part], padding_value=self.pad, padding_side=side).to(device)
                mask = pad([torch.ones_like(query) for query in part], padding_side=side).to(device)
                own = ids.shape[1] if is_decoder else 1
                if window is not None and kwargs.get("max_new_tokens") is not None:  # as the engine
                    settings["max_new_tokens"] = min(kwargs["max_new_tokens"], window - own)
                output = model.generate(input_ids=ids, attention_mask=mask, **settings)
                found += [_until_end(row[own:].tolist(), ends, settings["pad_token_id"]) for row in output]
        if len(found) != len(queries):
            raise ValueError(
                f"generate must give one response per query ({len(queries)}), got {len(found)}. Leave num_return_sequences at "
                "1, and repeat the queries."
            )
        return found


def _set_fields(config: Any) -> dict[str, Any]:
    """The fields of a generation config that are set."""
    return {
        name: value
        for name, value in vars(config).items()
        if value is not None and not name.startswith("_") and name != "transformers_version"
    }


def _without_config(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with those of a `generation_config` among them written out; single ones win."""
    single = {name: value for name, value in kwargs.items() if name != "generation_config"}
    given = {} if kwargs.get("generation_config") is None else _set_fields(kwargs["generation_config"])
    if "max_new_tokens" in given or "max_new_tokens" in kwargs:
        given.pop("max_length", None)
    return {**given, **single}


def _until_end(ids: list[int], ends: Collection[int], padding: int) -> list[int]:
    """Ids up to and with the first end token, or without the padding of a row that was stopped otherwise."""
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    while len(ids) > 1 and ids[-1] == padding:
        ids = ids[:-1]
    return ids
