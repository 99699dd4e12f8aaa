"""The fallback route: the model's own `generate` with our sampling.

For encoder-decoders, models that our cache does not support, and prompt learning. Finished rows stay in the batch. An
encoder runs each distinct prompt once, as does a decoder with images. Prompts of other lengths run apart where padding
would change their completions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from trl.collators.images import is_per_token
from trl.generation.transformers.decode_check import padding_leaks
from trl.generation.transformers.requests import Requests
from trl.models.packed.layout import Inputs
from trl.models.parts import CACHE, CACHE_NAMES, causal_core, prompt_learning_unsupported
from trl.tensors.padding import pad as pad_rows


class MoreInputs(NamedTuple):
    """Inputs of a decoder besides the prompts' ids, such as images.

    `of(requests, width)` builds them for prompts padded on the left to `width`. Requests with the same entry in `names`
    share them, and their prompt. Tokens in `unread` are placeholders in prompts; in completions `blank` is read.
    """

    of: Callable[[Sequence[int], int], Mapping[str, Tensor]]
    names: Sequence[Hashable]
    unread: Sequence[int] = ()
    blank: int = 0


class _OurDraws(LogitsProcessor):
    """Leaves one token for each row, the one that its request draws; finished rows repeat the pad token."""

    def __init__(self, requests: Requests, members: Tensor, pad: int, more: MoreInputs | None = None) -> None:
        self.requests, self.members, self.pad = requests, members, pad
        self.unread, self.blank = ((), 0) if more is None else (tuple(more.unread), more.blank)
        self.done = torch.zeros(len(members), dtype=torch.bool, device=members.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        tokens = torch.full_like(self.members, self.pad)
        active = (~self.done).nonzero()[:, 0]
        logits = scores[active].to(torch.promote_types(scores.dtype, torch.float32), copy=True)
        tokens[active], self.done[active] = self.requests.extend(self.members[active], logits)
        if self.unread:
            tokens = tokens.masked_fill(torch.isin(tokens, tokens.new_tensor(self.unread)), self.blank)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def all_done(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """A stopping criterion that ends all rows together, so that `generate` pads none."""
        return self.done.all().expand(len(self.done))


def generate_with_model(
    model: Any, requests: Requests, *, max_rows: int, pad: int, synced: bool = False,
    more_inputs: MoreInputs | None = None,
) -> None:  # fmt: skip
    """Run requests through `model.generate`, `max_rows` at once; `synced` keeps the ranks of ZeRO-3 in step."""
    core, queue = causal_core(model), requests.queue()
    before = core.generation_config
    # PEFT (0.21) puts virtual tokens before the padding and drops position ids; layers may ignore the mask.
    is_apart = prompt_learning_unsupported(model) is not None or padding_leaks(core)
    if is_apart and synced:
        max_rows = 1  # in all processes as many calls, where their prompts' lengths differ
    lengths = {request: len(requests.prompts[number]) for request, number in requests.prompt_of.items()}
    while queue:
        batch = [queue.popleft()]
        while queue and len(batch) < max_rows and (not is_apart or lengths[queue[0]] == lengths[batch[0]]):
            batch.append(queue.popleft())
        ours = _OurDraws(requests, torch.tensor(batch, device=requests.device), pad, more_inputs)
        longest = max(requests.limits[request] for request in batch)
        core.generation_config = _config(core, longest, pad)  # what another config leaves out is taken from it
        try:
            inputs = _inputs(model, requests, batch, pad)
            if more_inputs is not None:
                inputs = _with_more(model, inputs, more_inputs, batch, synced_gpus=synced)
            model.generate(
                **inputs,
                logits_processor=LogitsProcessorList([ours]),
                stopping_criteria=StoppingCriteriaList([ours.all_done]),  # pyright: ignore[reportArgumentType]
                synced_gpus=synced,
            )
        finally:
            core.generation_config = before


def cache_bytes(core: PreTrainedModel) -> dict[str, int]:
    """Bytes of a row in the model's cache, measured with a token: for each token, and besides (recurrent states)."""
    model = core
    ids = torch.zeros(1, 1, dtype=torch.int64, device=core.device)
    begin = {"decoder_input_ids": ids} if core.config.is_encoder_decoder else {}
    outputs = model(input_ids=ids, **begin, use_cache=True)
    cache = next((value for name, value in outputs.items() if name in CACHE_NAMES), None)
    sizes = {"token_bytes": 0, "row_bytes": 0}
    for layer in getattr(getattr(cache, "self_attention_cache", cache), "layers", ()):
        for name, value in vars(layer).items():
            kind = "token_bytes" if name in ("keys", "values") else "row_bytes"
            sizes[kind] += sum(part.nbytes for part in tree_leaves(value) if isinstance(part, Tensor))
    return sizes


def _config(core: PreTrainedModel, longest: int, pad: int) -> GenerationConfig:
    """A greedy config with the model's own first tokens."""
    begin = {}
    for name in ("decoder_start_token_id", "forced_bos_token_id", "bos_token_id"):
        token = getattr(core.generation_config, name, None)
        begin[name] = getattr(core.config, name, None) if token is None else token
    return GenerationConfig(max_new_tokens=longest, do_sample=False, num_beams=1, pad_token_id=pad, **begin)


def _inputs(model: Any, requests: Requests, batch: Sequence[int], pad: int) -> Inputs:
    """Prompts padded on the left for decoders; for encoder-decoders, the encoder's states of each prompt."""
    numbers = [requests.prompt_of[request] for request in batch]
    encoder_decoder = model.config.is_encoder_decoder
    distinct = list(dict.fromkeys(numbers)) if encoder_decoder else numbers
    prompts = [torch.tensor(requests.prompts[number]) for number in distinct]
    side = "right" if encoder_decoder else "left"
    ids = pad_rows(prompts, padding_value=pad, padding_side=side)
    mask = pad_rows([torch.ones_like(prompt) for prompt in prompts], padding_side=side)
    inputs = {"input_ids": ids.to(requests.device), "attention_mask": mask.to(requests.device)}
    if not encoder_decoder:
        return inputs
    rows = torch.tensor([distinct.index(number) for number in numbers], device=requests.device)
    if prompt_learning_unsupported(model):
        return {name: part[rows] for name, part in inputs.items()}
    encoded = model.get_encoder()(**inputs, return_dict=True)
    encoded.last_hidden_state = encoded.last_hidden_state[rows]
    return {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"][rows]}


def _with_more(
    model: Any, inputs: Mapping[str, Tensor], more: MoreInputs, batch: Sequence[int], **settings: Any
) -> Inputs:
    """Inputs of `model.generate`: padded prompts `(B, T)` of a `batch` of requests, with `more` inputs.

    Distinct prompts (without their last tokens) are run here once, if there are copies, and the cache is copied.
    `settings` are those of `generate`.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def more_of(batch: Sequence[int]) -> dict[str, Tensor]:
        return {name: value.to(ids.device) for name, value in more.of(batch, ids.shape[1]).items()}

    names = [more.names[request] for request in batch]
    distinct = list(dict.fromkeys(names))
    ends_blindly = bool(torch.isin(ids[:, -1], ids.new_tensor(list(more.unread))).any())
    is_short = not bool(mask[:, :-1].any(dim=1).all())
    if len(distinct) == len(batch) or ends_blindly or is_short or prompt_learning_unsupported(model):
        return {**inputs, **more_of(batch)}
    firsts = [names.index(name) for name in distinct]
    whole = {"input_ids": ids[firsts], "attention_mask": mask[firsts], **more_of([batch[row] for row in firsts])}
    heads = {
        name: value[:, :-1] if name in inputs or is_per_token(name, value, whole) else value
        for name, value in whole.items()
    }
    outputs = model.generate(**heads, **settings, max_new_tokens=1, return_dict_in_generate=True)
    rows = torch.tensor([distinct.index(name) for name in names], device=ids.device)
    cache = getattr(outputs, CACHE)
    cache.reorder_cache(rows)
    body = causal_core(model).base_model
    offsets = getattr(body, "rope_deltas", None)  # of each row's positions, in models like Qwen-VL
    if isinstance(offsets, Tensor):
        body.rope_deltas = offsets[rows]
    return {**inputs, CACHE: cache}
