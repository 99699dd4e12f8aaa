"""Decoders that generate with our cache: a small copy of each gives the logits of plain forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from trl.generation.transformers.cache import RolloutCache, rollout_attention_of
from trl.generation.transformers.decoders import OwnForward
from trl.generation.transformers.steps import Step
from trl.models.packed.attention import PACKED_ATTENTION
from trl.models.packed.small_copy import class_of, first_line, is_close, on_cpu, small_copy, small_model
from trl.models.packed.support import packed_unsupported
from trl.models.parts import (
    causal_core,
    decoder_of,
    embedded_tokens,
    head_unsupported,
    logit_rule,
    prompt_learning_unsupported,
)

# Prompts longer than the windows of copies, and shorter; two rows of some; completions that leave a window behind.
_LENGTHS, _PROMPT_OF, _STEPS = (11, 3, 7), (0, 0, 1, 2, 2), 8
_CLOSENESS = 1e-3  # of outputs, relative to the largest: parts of a layer may compute in float32


def decode_unsupported(model: nn.Module) -> str | None:
    """Why a model cannot decode with our cache; None if it can.

    It must take packed rows, as prompts are run in one. A copy with small random weights then decodes rows that share
    prompts, and the first part of a layer whose states are not those of plain forwards is named. This is done once for
    each class and small config.
    """
    core = causal_core(model)
    if len(set((getattr(core, "hf_device_map", None) or {}).values())) > 1:
        return "its layers are on several devices"
    return (
        packed_unsupported(core)
        or prompt_learning_unsupported(model)
        or head_unsupported(core, logit_rule(core.config))
        or _answer(core, _cache_differs)
    )


def padding_leaks(model: nn.Module) -> bool:
    """Whether padding on the left changes the rows that a model's own `generate` completes, by a copy likewise."""
    core = causal_core(model)
    config, dtype = core.config, torch.float64 if core.dtype == torch.float64 else torch.float32
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return False
    attention = config._attn_implementation
    attention = attention if attention in ("sdpa", PACKED_ATTENTION) else "eager"
    return _answer(core, _padding_differs, dtype, attention) is not None


_ANSWERS: dict[tuple[object, ...], str | None] = {}


def _answer(core: PreTrainedModel, question: Callable[..., str | None], *settings: object) -> str | None:
    """The answer to `question(copy, *settings)` for a small copy of a model."""
    kind = class_of(core)
    assert issubclass(kind, PreTrainedModel)
    config = small_copy(core.config)
    key = (kind, config.to_json_string(), question, *settings)
    if key not in _ANSWERS:
        try:
            with on_cpu(torch.float64), torch.no_grad():
                _ANSWERS[key] = question(small_model(kind, config), *settings)
        except Exception as error:  # a forward of unknown origin may raise anything
            _ANSWERS[key] = f"a small copy could not be run ({first_line(error)})"
    return _ANSWERS[key]


def _cache_differs(copy: PreTrainedModel) -> str | None:
    """The first part of a layer that does not continue rows from our cache as plain forwards do."""
    prompts, completions = _rows(embedded_tokens(copy))
    plain, cached = _Outputs(), _Outputs()
    with plain.of(decoder_of(copy)):
        logits = [
            copy(input_ids=torch.cat([prompts[prompt], completion])[None], use_cache=False).logits[0, -_STEPS - 1 :]
            for prompt, completion in zip(_PROMPT_OF, completions, strict=True)
        ]
    try:
        with cached.of(decoder_of(copy)):
            decoded = _decoded(copy, prompts, completions)
    except Exception as error:  # its layers may have another interface
        return f"{cached.entered} fails with our cache ({first_line(error)})"
    if _is_close(decoded, torch.stack(logits)):
        return None
    for name, outputs in plain.items():
        if len(cached.get(name, ())) == 1 + _STEPS and not _is_close(cached.by_row(name), torch.cat(outputs, dim=1)[0]):
            return f"{name} of a small copy gives other states with our cache"
    return "a small copy gives other logits with our cache"


def _padding_differs(copy: PreTrainedModel, dtype: torch.dtype, attention: str) -> str | None:
    """A statement, if the logits of a row's next tokens depend on padding before it."""
    model: Any = copy
    model.to(dtype).set_attn_implementation(attention)
    model.generation_config = GenerationConfig(
        max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    for prompt in _rows(embedded_tokens(copy))[0]:
        logits = list[Tensor]()
        for pads in (0, 7):
            ids, mask = (F.pad(part, (pads, 0))[None] for part in (prompt, torch.ones_like(prompt)))
            logits.append(torch.cat(model.generate(ids, attention_mask=mask).logits))
        if not _is_close(logits[1], logits[0]):
            return "padding changes its rows"
    return None


def _rows(vocabulary: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Prompts and completions; no token is a special one."""
    total = sum(_LENGTHS) + len(_PROMPT_OF) * _STEPS
    ids = 3 + 7 * torch.arange(total) % (vocabulary - 3)
    return ids[: sum(_LENGTHS)].split(_LENGTHS), ids[sum(_LENGTHS) :].view(-1, _STEPS)


def _decoded(copy: PreTrainedModel, prompts: tuple[Tensor, ...], completions: Tensor) -> Tensor:
    """Logits `(R, S + 1, V)` after the prompt and after each token of completions `(R, S)`."""
    cache, prompt, lengths = RolloutCache(), torch.tensor(_PROMPT_OF), torch.tensor(_LENGTHS)
    with rollout_attention_of(copy, cache):
        decoder = OwnForward(copy, cache)
        logits = [decoder.prefill([ids.tolist() for ids in prompts])[prompt]]
        step = cache.step = Step(torch.zeros_like(prompt), prompt, lengths)
        for tokens in completions.T:
            logits.append(decoder.decode(tokens, lengths[prompt] + step.columns))
            step.advance()
    return torch.stack(logits, dim=1)


def _is_close(values: Tensor, expected: Tensor) -> bool:
    return is_close(values, expected, tolerance=_CLOSENESS)


class _Outputs(dict[str, list[Tensor]]):
    """Outputs `(1, tokens, H)` of a decoder's layers and of their parts, in the order in which they ended."""

    entered = "its forward"  # or the last part that began

    @contextmanager
    def of(self, decoder: nn.Module) -> Iterator[None]:
        """Inside the block outputs are kept."""
        layers = next(module for module in decoder.modules() if isinstance(module, nn.ModuleList))
        with ExitStack() as hooks:
            for number, layer in enumerate(layers):
                for part, module in (*layer.named_children(), ("", layer)):
                    name = f"{part} ({type(module).__name__}, layer {number})" if part else f"layer {number}"
                    hooks.enter_context(module.register_forward_pre_hook(partial(self._begin, name)))
                    hooks.enter_context(module.register_forward_hook(partial(self._end, name)))
            yield

    def _begin(self, name: str, *_: object) -> None:
        self.entered = name

    def _end(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.ndim == 3 and len(first) == 1:
            self.setdefault(name, []).append(first)

    def by_row(self, name: str) -> Tensor:
        """Outputs `(tokens, H)` of prefilled prompts and decoded tokens, row by row, each with its prompt."""
        prompts, *steps = self[name]
        decoded = torch.cat(steps).transpose(0, 1)
        rows = zip(_PROMPT_OF, decoded, strict=True)
        return torch.cat([part for prompt, row in rows for part in (prompts[0].split(_LENGTHS)[prompt], row)])
