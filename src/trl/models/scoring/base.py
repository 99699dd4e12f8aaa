"""The base of all scorers: the layout that a model takes, and the reasons for fallbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.models.packed.inner_row import pack_decoder
from trl.models.packed.layout import (
    Columns,
    Inputs,
    ModelBatch,
    packed_batch,
    padded_batch,
    padded_rows,
    without_shared_prefixes,
)
from trl.models.packed.pieces import Piece, noise_of_piece, share_dropout
from trl.models.packed.sequence_group import SequenceGroup
from trl.models.packed.support import SEVERAL_MODELS, packed_unsupported, packing_of, use_packed_attention
from trl.models.parts import replaced_forward
from trl.models.scoring.head import Routing, router_inputs
from trl.options.shared import PrefixSharingMode

logger = logging.getLogger(__name__)

_OWN_LOGITS = "it is scored from its own logits"
_LENGTH_DEPENDENT = "its rotary angles depend on the length of a sequence (longrope or dynamic)"
_STRETCHED = ("longrope", "dynamic")  # other frequencies for sequences beyond the length of pretraining


class ScorerBase:
    """The base of scorers; decided once: `packed` or padded rows, through its head or from its own logits.

    `unsupported_reason`: why the head cannot be used alone (None: it can). `fallbacks` lists the reasons for fallbacks.
    `is_balanced`: a router's loss is computed from hidden states, with the routing of the step if that is set.
    """

    def __init__(
        self, core: PreTrainedModel, *, unsupported_reason: str | None, pad_token_id: int, packed: bool | None
    ) -> None:
        self.core = core
        self.pad_token_id = pad_token_id
        self.neftune_alpha: float | None = None
        self.routing_of_step: Routing | None = None  # None: a batch is scored by itself
        self.fallbacks: list[str] = []
        self.uses_head = unsupported_reason is None
        if unsupported_reason:
            self.fallbacks.append(f"{_OWN_LOGITS}, because {unsupported_reason}")
        self.router = router_inputs(core)  # arguments of the decoder
        if getattr(core.config.get_text_config(), "output_router_logits", False) and not self.router:
            self.fallbacks.append("output_router_logits has no effect, because transformers gives it no router's loss")
        self.stretched_rotaries: list[nn.Module] = [
            module for module in core.modules() if getattr(module, "rope_type", None) in _STRETCHED
        ]
        reason = _LENGTH_DEPENDENT if self.stretched_rotaries else packed_unsupported(core)
        reason = reason if self.uses_head else _OWN_LOGITS
        self.packed = packed is not False and reason is None
        if reason == SEVERAL_MODELS and packed is not False and not self.router:
            reason = pack_decoder(core)  # padded rows around a decoder without padding
        if packed is not False and reason:
            self.fallbacks.append(f"its batches are padded, because {reason}")
        # Not with flash attention that the user chose.
        self.with_table = self.packed and use_packed_attention(core)
        self.shares_prefixes = self.with_table and packing_of(core).shares
        is_decoder = not getattr(core.config, "is_encoder_decoder", False)
        self.is_balanced = self.uses_head and is_decoder and bool(self.router)

    group: SequenceGroup | None = None  # of processes that score each batch together

    @property
    def router_weight(self) -> float:
        """The weight of the router's loss in a mixture of experts, as its config says now; 0 for other models."""
        config = self.core.config.get_text_config()
        places = ((config, "router_aux_loss_coef"), (config, "aux_loss_coef"), (self.core, "router_aux_loss_coef"))
        return next((getattr(place, name) for place, name in places if hasattr(place, name)), 0.0)

    def join(self, group: SequenceGroup | None) -> None:
        """Score with the processes of a group, each its own piece of tokens; all are given the same batches.

        Raises: ValueError for a model with other layers than attention that mix tokens, or one that is not packed.
        """
        if group is None:
            return
        if reason := self._unshared():
            raise ValueError(
                f"sp_size={group.size} spreads tokens over processes, not of {type(self.core).__name__}: {reason}. "
                "Use sp_size=1."
            )
        self.group = group
        share_dropout(self.core, group)

    def _unshared(self) -> str | None:
        """The reason why the tokens of a row cannot be spread over processes; None if they can."""
        if not self.packed:
            return "; ".join(self.fallbacks) or "its batches are padded"
        if not self.with_table:
            return f"its attention is {self.core.config._attn_implementation!r}, not 'sdpa'"
        if mixers := packing_of(self.core).mixers:
            return f"its {' and '.join(sorted(mixer.__name__ for mixer in mixers))} mixes tokens too"
        return None

    def piece_of(self, rows: ModelBatch) -> Piece:
        """This process's piece of a row that its group scores together."""
        assert self.group is not None
        return Piece.of(rows, self.group, pad_token_id=self.pad_token_id)

    def rows_here(self, batch: Columns) -> tuple[ModelBatch, Piece | None]:
        """What this process scores of a batch: all of it, or its piece."""
        rows = self.lay_out(batch)
        if self.group is None:
            return rows, None
        piece = self.piece_of(rows)
        return piece.rows, piece

    @property
    def layout(self) -> tuple[bool, bool]:
        """Whether rows are packed, and whether they share prompts."""
        return self.packed, self.shares_prefixes

    def lay_out(self, batch: Columns, *, shifted: bool = True) -> ModelBatch:
        """The batch in the layout that this model takes."""
        if self.packed:
            if not self.shares_prefixes:  # as another model's layout may have made them
                batch = without_shared_prefixes(batch, pad_token_id=self.pad_token_id)
            return packed_batch(batch, with_table=self.with_table, shifted=shifted)
        return padded_batch(batch, pad_token_id=self.pad_token_id, shifted=shifted)

    def padded(self, batch: Columns) -> ModelBatch:
        """The batch as padded rows, whatever layout the model takes."""
        return padded_batch(batch, pad_token_id=self.pad_token_id) if self.packed else self.lay_out(batch)

    def padded_inputs(self, batch: Columns) -> dict[str, Tensor]:
        """A batch of either layout as padded `input_ids`, `attention_mask` and `labels`, each `(B, T)`."""
        return padded_rows(batch, pad_token_id=self.pad_token_id)

    def uncompiled(self, model: nn.Module) -> nn.Module:
        """The module without `torch.compile`, which cannot trace a replaced forward; warns once."""
        inner: nn.Module = getattr(model, "_orig_mod", model)
        in_place = [part for part in (model, self.core) if getattr(part, "_compiled_call_impl", None)]
        for part in in_place:
            part._compiled_call_impl = None  # type: ignore[assignment]
        reason = "it runs uncompiled (torch_compile has no effect): the scoring forward replaces its own"
        if (in_place or inner is not model) and reason not in self.fallbacks:
            self.fallbacks.append(reason)
            logger.warning("%s: %s.", type(self.core).__name__, reason)
        return inner

    @contextmanager
    def embedded(self, batch: ModelBatch) -> Iterator[None]:
        """A block with rotary angles of each row by itself and, if `neftune_alpha` is set, noise on the embeddings.

        transformers takes the angles from the longest row of a call, so a row's loss would depend on the others.
        NEFTune (arXiv:2310.05914, eq. 1): uniform noise of size alpha / sqrt(L d), L the sequence's own length.
        """
        alpha = (self.neftune_alpha or 0.0) if self.core.training else 0.0

        def add_noise(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
            lengths = batch.sequence_lengths.view(embedded.shape[:-1]).clamp(min=1)
            size = alpha / (lengths * embedded.shape[-1]).sqrt()
            size = torch.where(batch.sequence_lengths.view_as(lengths) > 0, size, 0.0).to(embedded.dtype)
            return embedded + noise_of_piece(embedded, batch.shared) * size[..., None]

        with ExitStack() as block:
            if alpha:
                block.enter_context(self.core.get_input_embeddings().register_forward_hook(add_noise))
            for module in self.stretched_rotaries:
                block.enter_context(replaced_forward(module, _by_row(module, batch)))
            yield


def given_inputs(inputs: Mapping[str, object]) -> Inputs:
    """The arguments that a wrapper (PEFT) gives to a model's forward, without None and `return_dict`."""
    return {name: value for name, value in inputs.items() if value is not None and name != "return_dict"}


def _by_row(module: nn.Module, rows: ModelBatch) -> Callable[..., tuple[Tensor, Tensor]]:
    inner, width = module.forward, rows.inputs["input_ids"].shape[1]
    lengths = rows.sequence_lengths.view(-1, width).amax(dim=1)

    def forward(x: Tensor, position_ids: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
        if position_ids.shape[1] != width:
            return inner(x, position_ids, **kwargs)
        angles = []
        for length in lengths.tolist():
            inner(x[:1], position_ids[:1, :1] * 0, **kwargs)  # "dynamic" angles only grow until a short call
            angles.append(inner(x[:1], position_ids[:1].clamp(max=length - 1), **kwargs))
        cosines, sines = (torch.cat(part) for part in zip(*angles, strict=True))
        return cosines, sines

    return forward


def shares_prefix(scorer: Any, prefix_sharing: PrefixSharingMode) -> bool:
    """Whether completions share one copy of their prompt; warns if a model of packed rows does not support it.

    Raises: ValueError if it is required and not supported.
    """
    if scorer.shares_prefixes or prefix_sharing is False:
        return prefix_sharing is not False
    layers = "layers only separate" if scorer.with_table else "flash attention only separates"
    unsupported = f"its {layers} plain sequences"
    if prefix_sharing is True:
        why = unsupported if scorer.packed else "; ".join(scorer.fallbacks) or "it takes padded rows only"
        raise ValueError(
            f"prefix_sharing=True, but {type(scorer.core).__name__} cannot share prompts: {why}. Use 'auto'."
        )
    if scorer.packed:
        logger.warning("prefix sharing is disabled, because %s.", unsupported)
    return False
