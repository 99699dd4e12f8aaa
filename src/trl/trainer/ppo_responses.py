"""Responses of a step-level trainer: their generation, their scores, and the minibatches of an update."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from trl.collators.preference import seq2seq_batch
from trl.generation.engine import Sampling, unsupported_settings
from trl.generation.main_process import first_rng_stream
from trl.generation.transformers.engine import TransformersEngine
from trl.models.parts import causal_core
from trl.models.scoring.head import ScoreOptions
from trl.rollouts.experience import Experience
from trl.tensors.ragged import Ragged

# Defaults of transformers, under the model's generation config and the arguments of the call.
_DEFAULTS = {"max_length": 20, "do_sample": False, "top_k": 50}


def sampling_of(core: PreTrainedModel, arguments: Mapping[str, Any], warn: Callable[..., None]) -> Sampling:
    """The engine's settings for `arguments` of a transformers model's `generate`, over its generation config.

    A length in the arguments replaces that of a `generation_config` among them, and this the model's.

    What the engine does not support, such as beams, is left out of the model's config, with a warning.

    Raises: ValueError for such settings in the arguments.
    """
    defaults = _set_fields(core.generation_config)
    unsupported = {name: defaults.pop(name) for name in unsupported_settings(defaults)}
    if core.config.is_encoder_decoder:
        unsupported.pop("forced_bos_token_id", None)  # which the engine itself reads
    if unsupported:
        warn(
            "The model's generation config has %s, which rollouts do not support and leave out.",
            ", ".join(f"{name}={value!r}" for name, value in unsupported.items()),
        )
    single = {name: value for name, value in arguments.items() if name != "generation_config"}
    settings: dict[str, Any] = {}
    for layer in (_DEFAULTS, defaults, _set_fields(arguments.get("generation_config")), single):
        if "max_length" in layer:
            settings.pop("max_new_tokens", None)
        settings |= layer
        if "max_new_tokens" in layer:
            settings.pop("max_length", None)
    return Sampling().updated(settings)


def _set_fields(config: GenerationConfig | None) -> dict[str, Any]:
    """The fields of a generation config that are set."""
    fields = {} if config is None else vars(config)
    return {name: value for name, value in fields.items() if value is not None and not name.startswith("_")}


class ResponseScores(NamedTuple):
    """Scores of B responses, each `(B, R)`, 0 after a response's end; `entropies` and `logits (B, R, V)` on request."""

    logps: Tensor
    values: Tensor | None
    entropies: Tensor | None
    logits: Tensor | None


def responses_as_rows(queries: Sequence[Tensor], responses: Sequence[Tensor]) -> Experience:
    """Queries and responses as an `Experience`, on the responses' device."""
    device = responses[0].device
    prompts, completions = (Ragged.of([row.to(device) for row in part]) for part in (queries, responses))
    return Experience(prompts.to(device), completions.to(device))


def score_responses(
    scorer: Any, model: nn.Module, rows: Experience, *, logits: bool = False, entropies: bool = False
) -> ResponseScores:
    """Scores of one forward pass, with gradient unless it is off; equal queries must be neighbours."""
    prompts = [prompt.tolist() for prompt in rows.prompts.split()]
    order = torch.tensor(sorted(range(len(rows)), key=prompts.__getitem__))
    rows = rows.take(order.to(rows.prompts.values.device))
    is_encoder_decoder = scorer.core.config.is_encoder_decoder
    if is_encoder_decoder:
        pairs = zip(rows.prompts.split(), rows.completions.split(), strict=True)
        columns = [{"prompt_input_ids": prompt, "completion_input_ids": completion} for prompt, completion in pairs]
        batch = seq2seq_batch(columns, pad_token_id=scorer.pad_token_id, completions=("completion_input_ids",))
    else:
        batch = rows.as_batch(prefix_sharing=scorer.shares_prefixes)
        del batch["rows"]
    batch = {name: value.to(rows.completions.values.device) for name, value in batch.items()}
    options = ScoreOptions(entropy="scored" if entropies else "none")
    lengths, places, chosen = rows.completions.lengths.tolist(), order.argsort().tolist(), None
    if logits:
        scored, whole = scorer.score_with_logits(model, batch, options)
        begins = [0 if is_encoder_decoder else length - 1 for length in rows.prompts.lengths.tolist()]
        parts = zip(whole, begins, lengths, strict=True)
        chosen = torch.cat([row[begin : begin + length] for row, begin, length in parts])
    else:
        scored = scorer.score(model, batch, options)

    def padded(flat: Tensor | None) -> Any:
        if flat is None:
            return None
        found = flat.split(lengths)
        return pad_sequence([found[place] for place in places], batch_first=True)

    return ResponseScores(*map(padded, (scored.logps, scored.values, scored.entropies, chosen)))


def join_rows(parts: Sequence[Tensor | None]) -> Any:
    """Concatenate tensors `(b, r, ...)` to `(B, R, ...)`, padded with 0; None stays None.

    >>> join_rows([torch.ones(1, 1), torch.ones(1, 2)])
    tensor([[1., 0.],
            [1., 1.]])
    """
    rows = [row for part in parts if part is not None for row in part]
    return pad_sequence(rows, batch_first=True) if rows else None


def shuffled_minibatches(rows: int, mini_batch_size: int, accumulation: int) -> Iterator[list[list[int]]]:
    """The minibatches of each optimiser step of one epoch, in an order from numpy's global generator."""
    order = np.random.permutation(rows).tolist()
    size = mini_batch_size * accumulation
    for begin in range(0, rows, size):
        step = order[begin : begin + size]
        yield [step[first : first + mini_batch_size] for first in range(0, len(step), mini_batch_size)]


class Responder:
    """Generates responses of a model, in the form that `generate` of the trainer returns."""

    def __init__(
        self, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, start: int | None, warn: Callable[..., None]
    ) -> None:
        """`start`: the token that begins the responses of an encoder-decoder."""
        self._accelerator, self._tokenizer, self._start, self._warn = accelerator, tokenizer, start, warn
        self._engines: dict[int, TransformersEngine] = {}  # by model: they keep what they find out about it

    def __call__(
        self,
        model: Any,
        queries: list[Tensor],
        settings: Mapping[str, Any],
        *,
        length_sampler: Callable[[], int] | None,
        return_prompt: bool,
    ) -> list[Tensor]:
        """A response to each query; `settings` are those of a transformers model's `generate`."""
        parts = {"accelerator": self._accelerator, "tokenizer": self._tokenizer}
        if id(model) not in self._engines:
            self._engines[id(model)] = TransformersEngine(model, **parts)
        engine = self._engines[id(model)]
        limits: list[int | None] = [None] * len(queries)
        if length_sampler is not None:
            limits = [int(length_sampler()) for _ in queries]
            settings = {**settings, "max_new_tokens": max(limits)}  # type: ignore[type-var]
        unwrapped: Any = self._accelerator.unwrap_model(model)
        core = causal_core(getattr(unwrapped, "pretrained_model", unwrapped))
        first = first_rng_stream()
        completions = engine.generate(
            [query.tolist() for query in queries],
            sampling_of(core, settings, self._warn),
            streams=range(first, first + len(queries)),
        )
        rows = [query.new_tensor(one.ids[:n]) for query, one, n in zip(queries, completions, limits, strict=True)]
        if self._start is not None:  # as `generate` of an encoder-decoder: never the query
            return [torch.cat([row.new_tensor([self._start]), row]) for row in rows]
        return [torch.cat(pair) for pair in zip(queries, rows, strict=True)] if return_prompt else rows


def log_distribution(logits: Tensor) -> Tensor:
    """Log-probs of the whole vocabulary, in float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that a block takes to `times`."""
    began = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - began
