"""Responses to queries, in the form that the step-level trainer returns them: token ids, with or without the query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trl.data.step_inputs import TokenLimits
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine, generating
from trl.generation.transformers.requests import fresh_seed
from trl.generation.transformers.stopping import end_tokens
from trl.models.parts import causal_core

# What transformers assumes where neither the call nor the model's generation config says.
_DEFAULTS = {"max_length": 20, "do_sample": False, "top_k": 50}


class Responder:
    """Generates from one model: through the engine where it can honour the arguments, else by the model's `generate`."""

    def __init__(self, model: nn.Module, *, accelerator: Any, tokenizer: Any, limits: TokenLimits) -> None:
        self.model, self.accelerator, self.tokenizer = model, accelerator, tokenizer
        self.start, self.window = limits.start, limits.context_length
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
        kwargs = _plain(generation_kwargs)
        if lengths is not None:
            kwargs["max_new_tokens"] = max(lengths)
            kwargs.pop("max_length", None)
        sampling = self._sampling(kwargs)
        if sampling is None:
            completions = self._by_model(queries, kwargs, batch_size)
        else:
            completions = self._by_engine(queries, sampling)
        if lengths is not None:
            completions = [ids[:length] for ids, length in zip(completions, lengths, strict=True)]
        return [
            self._returned(query, ids, return_prompt) for query, ids in zip(queries, completions, strict=True)
        ]

    def _returned(self, query: Tensor, completion: list[int], return_prompt: bool) -> Tensor:
        ids = torch.tensor(completion, dtype=torch.int64, device=query.device)
        if (
            self.start is not None
        ):  # as `generate` of an encoder-decoder: its start token first, never the query
            return torch.cat([ids.new_tensor([self.start]), ids])
        return torch.cat([query, ids]) if return_prompt else ids

    def _core(self) -> Any:
        model: Any = self.accelerator.unwrap_model(self.model)
        return causal_core(getattr(model, "pretrained_model", model))

    def _sampling(self, kwargs: dict[str, Any]) -> Sampling | None:
        """The engine's settings for these arguments over the model's generation config; None where it has none."""
        given = {**_DEFAULTS, **_set_fields(self._core().generation_config), **kwargs}
        if "max_new_tokens" in given and "max_length" not in kwargs:
            given.pop("max_length")
        try:
            return Sampling().updated(given)
        except ValueError:
            return None  # beams, n-gram bans, processors: for the model's own generate, which checks names itself

    def _by_engine(self, queries: Sequence[Tensor], sampling: Sampling) -> list[list[int]]:
        first = self.accelerator.process_index * len(queries)
        streams = range(first, first + len(queries))
        prompts = [query.tolist() for query in queries]
        return [done.ids for done in self.engine.generate(prompts, sampling, streams=streams)]

    def _by_model(
        self, queries: Sequence[Tensor], kwargs: dict[str, Any], batch_size: int
    ) -> list[list[int]]:
        found: list[list[int]] = []
        seed = fresh_seed() + self.accelerator.process_index  # random streams are put back behind the block
        with generating(self.model, self.accelerator) as model:
            torch.manual_seed(seed)
            ends = end_tokens(None, causal_core(model))
            if kwargs.get("eos_token_id") is not None:
                several = kwargs["eos_token_id"]
                ends = set(several if isinstance(several, (list, tuple)) else [several])
            for begin in range(0, len(queries), batch_size):
                part = queries[begin : begin + batch_size]
                inputs, settings = self._padded(part), {"pad_token_id": self._pad(), **kwargs}
                output = model.generate(**inputs, **self._inside_window(settings, max(map(len, part))))
                own = 1 if self.start is not None else inputs["input_ids"].shape[1]
                found += [_until_end(row[own:].tolist(), ends, settings["pad_token_id"]) for row in output]
        if len(found) != len(queries):
            raise ValueError(
                f"generate must give one response per query ({len(queries)}), got {len(found)}. Leave num_return_sequences at "
                "1, and repeat the queries."
            )
        return found

    def _padded(self, queries: Sequence[Tensor]) -> dict[str, Tensor]:
        """Queries padded for `generate`: on the left for decoders, on the right for encoders."""
        width, pad = max(map(len, queries)), self._pad()
        device = self.accelerator.device
        ids = torch.full((len(queries), width), pad, device=device)
        mask = torch.zeros_like(ids)
        for row, query in enumerate(queries):
            place = slice(0, len(query)) if self.start is not None else slice(width - len(query), width)
            ids[row, place], mask[row, place] = query.to(device), 1
        return {"input_ids": ids, "attention_mask": mask}

    def _inside_window(self, kwargs: dict[str, Any], longest: int) -> dict[str, Any]:
        """Arguments that ask for no more new tokens than the window has room for, as the engine ends there too."""
        if self.window is None or kwargs.get("max_new_tokens") is None:
            return kwargs
        room = self.window - (1 if self.start is not None else longest)
        return {**kwargs, "max_new_tokens": min(kwargs["max_new_tokens"], room)}

    def _pad(self) -> int:
        own = getattr(self.tokenizer, "pad_token_id", None)
        return 0 if own is None else int(own)


def _set_fields(config: Any) -> dict[str, Any]:
    """What a generation config says, by name."""
    return {
        name: value
        for name, value in vars(config).items()
        if value is not None and not name.startswith("_") and name != "transformers_version"
    }


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with those of a `generation_config` among them written out; single ones win."""
    kwargs = dict(kwargs)
    config = kwargs.pop("generation_config", None)
    if config is None:
        return kwargs
    given = _set_fields(config)
    if "max_new_tokens" in given or "max_new_tokens" in kwargs:
        given.pop("max_length", None)
    return {**given, **kwargs}


def _until_end(ids: list[int], ends: Any, pad: int) -> list[int]:
    """Ids up to and with the first end token, or up to what fills up a row that was stopped otherwise."""
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    length = len(ids)
    while length > 1 and ids[length - 1] == pad:
        length -= 1
    return ids[:length]
