"""The last decoder layer at the positions whose hidden states are read, and nowhere else.

No token attends to another one's state behind the last layer: a position that is not scored has to give keys and values
there, and nothing else. So for the time of one forward the layer's own `forward` is run on the rows of the wanted
positions; only its attention is given all rows. The queries of the others, their attention's output, feed-forward and
norms are left out. Modules are called as ever, so that the hooks of DDP, FSDP2 and ZeRO-3 fire. What the model returns at
other positions is 0. Losses and gradients of the wanted ones stay the same to rounding: nothing of the others would
reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trl.models.attention import FLAT_ATTENTION, FLAT_MODEL_TYPES
from trl.models.dropout import has_noise, is_noisy
from trl.models.parts import replaced_forward

_WORTH_IT = 0.9  # share of wanted positions above which all are computed

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Names:
    """What an architecture calls the parts of its decoder and of a layer."""

    decoder: str = ""  # within the model without its head
    layers: str = "layers"
    attention: str = "self_attn"
    norm: str = "input_layernorm"  # before the attention; not every architecture has one there
    query: str = "q_proj"  # absent where one product gives queries, keys and values
    output: str = "o_proj"
    final_norm: str = "norm"


# Architectures whose last layer treats each token by itself, but for its attention: tests/models/test_last_layer.py
# checks each.
NAMES = {
    **dict.fromkeys(FLAT_MODEL_TYPES, _Names()),
    "gpt2": _Names(layers="h", attention="attn", norm="ln_1", output="c_proj", final_norm="ln_f"),
    "gpt_neox": _Names(attention="attention", output="dense", final_norm="final_layer_norm"),
    "opt": _Names(
        decoder="decoder", norm="self_attn_layer_norm", output="out_proj", final_norm="final_layer_norm"
    ),
}


@contextmanager
def last_layer_at(core: PreTrainedModel, positions: Tensor, shape: torch.Size) -> Iterator[None]:
    """Let the hidden states `(*shape, H)` of `core`'s decoder be computed at `positions` only, for a forward inside.

    `positions`, int64 in any order, index the flattened states. A model that is not known, or whose last layer is known to
    do more than treat each token by itself, is left as it is. Where gradient checkpointing runs the layer again in the
    backward pass, it takes the same positions.
    """
    last = _LastLayer.of(core)
    rows = None if last is None else _Rows.of(positions, shape)
    if last is None or rows is None:
        yield
        return
    with last.at(rows):
        yield


@dataclass(frozen=True, slots=True)
class _LastLayer:
    """The last layer of a decoder, its modules that see all rows or leave some out, and the norm behind it."""

    layer: GradientCheckpointingLayer
    norm: nn.Module | None  # before the attention
    attention: nn.Module
    query: nn.Module | None
    output: nn.Module
    final_norm: nn.Module | None
    is_flat: bool  # whether its attention can leave queries out

    @classmethod
    def of(cls, core: PreTrainedModel) -> _LastLayer | None:
        """That of a known model whose decoder and layer are as transformers made them: not compiled, not in a wrapper of their
        own, no module of them at two places."""
        names = NAMES.get(core.config.model_type)
        if names is None or not _treats_rows_alike(core):
            return None
        decoder = _child(core.base_model, names.decoder) if names.decoder else core.base_model
        if decoder is None or not _is_as_made(decoder):
            return None
        layers: Any = decoder.get_submodule(names.layers)
        *others, layer = layers[: core.config.num_hidden_layers]
        final_norm = _child(decoder, names.final_norm)
        attention = _child(layer, names.attention)
        output, query = _child(attention, names.output), _child(attention, names.query)
        if attention is None or output is None or not _is_as_made(attention) or not _is_layer_as_made(layer):
            return None
        if layer in others or any(module is final_norm for module in layer.modules()):
            return None
        if layer.training:
            if any(map(is_noisy, _by_token(layer, attention, output))):
                return None
            query = None if query is None or has_noise(query) else query
        norm = (
            _child(layer, names.norm) if getattr(layer, "do_layer_norm_before", True) else None
        )  # OPT 350m: behind
        is_flat = core.config._attn_implementation == FLAT_ATTENTION
        return cls(layer, norm, attention, query, output, final_norm, is_flat)

    @contextmanager
    def at(self, rows: _Rows) -> Iterator[None]:
        """Let a forward inside of the block compute these rows; its gradient checkpoints, which run later, as well."""
        with ExitStack() as replaced:
            if self.layer.gradient_checkpointing and self.layer.training:
                replaced.enter_context(self._checkpoints_at(rows))
            else:
                replaced.enter_context(replaced_forward(self.layer, self._layer_at(rows)))
            if self.final_norm is not None:
                replaced.enter_context(
                    replaced_forward(self.final_norm, rows.given_back_by(self.final_norm.forward))
                )
            yield

    @contextmanager
    def _checkpoints_at(self, rows: _Rows) -> Iterator[None]:
        """Let what a gradient checkpoint keeps to run again be the layer at the rows: the backward pass comes later."""
        layer: Any = self.layer
        checkpoint: Forward = layer._gradient_checkpointing_func

        def at_rows(call: Forward, *args: Any) -> Any:
            def call_at_rows(*args: Any) -> Any:
                with replaced_forward(layer, self._layer_at(rows)):
                    return call(*args)

            return checkpoint(call_at_rows, *args)

        layer._gradient_checkpointing_func = at_rows
        try:
            yield
        finally:
            layer._gradient_checkpointing_func = checkpoint

    def _layer_at(self, rows: _Rows) -> Forward:
        """The layer's forward from all rows to the wanted ones; all again where no norm comes behind that gives them back."""
        whole = self.layer.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if hidden.shape[:-1] != rows.shape:
                return whole(hidden, *args, **kwargs)
            with self._attending_to_all(hidden, rows):
                found = whole(rows.take(hidden), *args, **kwargs)
            return rows.give_back(found) if self.final_norm is None else found

        return forward

    @contextmanager
    def _attending_to_all(self, hidden: Tensor, rows: _Rows) -> Iterator[None]:
        """Give the attention all rows of the layer's input `hidden`, normed, while the layer goes on with some."""
        attended = hidden
        norm, attention, output = self.norm, self.attention, self.output.forward

        def norm_of_all(_: Tensor) -> Tensor:
            nonlocal attended
            assert norm is not None
            attended = norm(hidden)
            return rows.take(attended)

        def attend(*args: Any, **kwargs: Any) -> Any:
            if self.is_flat:
                kwargs["read"] = rows.positions
            if args:
                return attention(attended, *args[1:], **kwargs)
            return attention(**{**kwargs, "hidden_states": attended})

        with ExitStack() as replaced:
            replaced.enter_context(_called_instead(self.layer, attention, attend))
            replaced.enter_context(replaced_forward(self.output, lambda states: output(rows.take(states))))
            if norm is not None:
                replaced.enter_context(_called_instead(self.layer, norm, norm_of_all))
            if self.query is not None:
                queries = self.query.forward
                replaced.enter_context(
                    replaced_forward(self.query, lambda states: rows.give_back(queries(rows.take(states))))
                )
            yield


@contextmanager
def _called_instead(parent: nn.Module, child: nn.Module, call: Forward) -> Iterator[None]:
    """Let `parent` call a function where it would call its child: the child's own hooks (ZeRO-3 gathers and frees weights in
    them) then see what the function gives it and takes from it."""
    name = next(name for name, module in parent.named_children() if module is child)
    vars(parent)[name] = call  # found before the child, which stays where it is
    try:
        yield
    finally:
        del vars(parent)[name]


def _treats_rows_alike(core: PreTrainedModel) -> bool:
    """Whether a product's row is the same whichever other rows are there, and whole (no tensor parallelism).

    Weights in 8 bits look at all rows of their input, other formats may; of adapters, plain LoRA is known not to.
    """
    if (getattr(core, "_tp_size", None) or 1) > 1:
        return False
    if getattr(core, "is_quantized", False) and not getattr(core, "is_loaded_in_4bit", False):
        return False
    adapters = getattr(core, "peft_config", None) or {}
    return all(
        config.peft_type == "LORA" and not getattr(config, "alora_invocation_tokens", None)
        for config in adapters.values()
    )


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Module) else None


def _is_as_made(module: nn.Module) -> bool:
    """Whether a module's forward is transformers' own, which calls its children by the names that are known, and not compiled."""
    if "forward" in vars(module) or getattr(module, "_compiled_call_impl", None):
        return False
    return type(module).forward.__module__.startswith("transformers.")


def _is_layer_as_made(layer: nn.Module) -> bool:
    """Whether nothing stands between the layer and its callers: FSDP's or a checkpoint's wrapper, a compiler, a move
    between devices, a forward of somebody else's."""
    is_plain = isinstance(layer, GradientCheckpointingLayer) and not hasattr(layer, "_hf_hook")
    if not is_plain or not _is_as_made(layer):
        return False
    return not any(
        getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod")
        for module in layer.modules()
    )


def _by_token(layer: nn.Module, attention: nn.Module, output: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer that some rows pass: all but the attention and its projections of all rows."""
    of_all = {attention}
    for child in attention.children():
        if child is not output and not isinstance(child, nn.Dropout):
            of_all.update(child.modules())
    return (module for module in layer.modules() if module not in of_all)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The wanted ones of a batch's positions, flattened: int64 `(K,)`, ascending, each once; `shape` is the batch's."""

    positions: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, positions: Tensor, shape: torch.Size) -> _Rows | None:
        """None where there is nothing to leave out, or nothing to compute."""
        wanted = torch.zeros(shape.numel(), dtype=torch.bool, device=positions.device)
        wanted[positions] = True
        rows = wanted.nonzero()[:, 0]
        return cls(rows, shape) if 0 < len(rows) <= _WORTH_IT * len(wanted) else None

    def take(self, states: Tensor) -> Tensor:
        """The wanted rows of all: `(*shape, H) -> (1, K, H)`."""
        return _Take.apply(states.reshape(self.shape.numel(), -1), self.positions.to(states.device))[None]

    def give_back(self, states: Tensor) -> Tensor:
        """The wanted rows among zeros: `(1, K, H) -> (*shape, H)`."""
        positions = self.positions.to(states.device)
        return _GiveBack.apply(states[0], positions, self.shape.numel()).view(*self.shape, -1)

    def given_back_by(self, forward: Forward) -> Forward:
        """A forward whose result has all rows again where it was given the wanted ones."""

        def all_rows(states: Tensor) -> Tensor:
            found = forward(states)
            return self.give_back(found) if states.shape[:-1] == (1, len(self.positions)) else found

        return all_rows


class _Take(torch.autograd.Function):
    """Rows of a matrix; the gradient is written into zeros, not added, because no row is taken twice."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.rows = len(states)
        return states.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _GiveBack.apply(grads[0], *ctx.saved_tensors, ctx.rows), None


class _GiveBack(torch.autograd.Function):
    """Rows at their places in a matrix of zeros."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, positions: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(positions)
        return states.new_zeros(rows, states.shape[-1]).index_copy_(0, positions, states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Take.apply(grads[0], *ctx.saved_tensors), None, None
