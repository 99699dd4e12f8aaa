"""Which models take packed rows: found by a test of a small copy of the model, once for each class and config.

The copy has random weights. Each of a few sequences is run alone with transformers' eager attention, then all in one
packed row with ours. The first layer whose output differs though its input does not mixes the row's sequences: it is
run on them one by one (mixers.py), and the test is repeated. A model that still differs takes padded rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from trl.models.packed.attention import PACKED_ATTENTION
from trl.models.packed.mixers import cut_into_rows
from trl.models.packed.small_copy import class_of, first_line, is_close, on_cpu, small_copy, small_model
from trl.models.parts import decoder_of, replaced_forward
from trl.models.switches import holding
from trl.tensors.segments import Segments

logger = logging.getLogger(__name__)

VARIABLE_LENGTH_IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3", "kernels-community/")
# Longer than the windows of a small copy. Branches of a prompt, and sequences without one.
_SHARED, _PLAIN = Segments.from_prefix_groups([(8, [6, 7])]), Segments.from_lengths([9, 14])
_TOLERANCE = 1e-5  # of the largest entry: norms and rotary angles are computed in float32
SEVERAL_MODELS = "its config is that of several models"
_MOST_MIXERS = 4  # kinds of layers
# Packages whose layers compute each token by itself: of adapters, quantised weights, and kernels.
_OF_TOKENS = (
    "torch.", "peft.", "bitsandbytes.", "accelerate.", "deepspeed.", "trl.", "liger_kernel.", "kernels.", "torchao.",
    "auto_gptq.", "gptqmodel.", "awq.", "hqq.", "aqlm.", "quanto.", "optimum.", "eetq.", "compressed_tensors.",
    "transformer_engine.", "transformers.integrations.", "transformers.activations", "transformers.pytorch_utils",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packing:
    """How a model takes packed rows.

    `unsupported` is the reason why it does not, `mixers` are classes of layers that run on a row's sequences one by
    one, `shares` says whether completions can share a prompt. The decoder's output is that of its module `ends_in`, if
    that computes each token by itself. `tested` are the classes of modules that the test has seen.
    """

    unsupported: str | None = None
    mixers: frozenset[type[nn.Module]] = frozenset()
    shares: bool = False
    ends_in: str | None = None
    tested: frozenset[type[nn.Module]] = frozenset()


_PACKINGS: dict[tuple[type[PreTrainedModel], str], Packing] = {}
_OF_MODELS: WeakKeyDictionary[PreTrainedModel, Packing] = WeakKeyDictionary()


def packing_of(core: PreTrainedModel) -> Packing:
    """How a model takes packed rows, by its config at the first call; models of a class and config are tested once."""
    if core not in _OF_MODELS:
        _OF_MODELS[core] = _packing_by_config(core)
    return _OF_MODELS[core]


def _packing_by_config(core: PreTrainedModel) -> Packing:
    config = core.config
    if getattr(config, "is_encoder_decoder", False):
        return Packing("it is an encoder-decoder model")
    if config.get_text_config() is not config:
        return Packing(SEVERAL_MODELS)
    decoder = _decoder(core)
    if not isinstance(decoder, PreTrainedModel) or (decoder is core and core.get_output_embeddings() is not None):
        return Packing("it exposes no decoder")
    small = small_copy(config)
    small._attn_implementation = "eager"
    kind = class_of(decoder)
    assert issubclass(kind, PreTrainedModel)
    key = kind, small.to_json_string(use_diff=False)
    if key not in _PACKINGS:
        _PACKINGS[key] = _tested(kind, small, config)
    return _PACKINGS[key]


def _decoder(core: PreTrainedModel) -> nn.Module:
    return core.base_model if core.base_model is not core else decoder_of(core)  # Llama 4's has another name


def packed_unsupported(model: PreTrainedModel) -> str | None:
    """The reason why this model does not support packed rows; None if it does."""
    config = model.config
    if not getattr(config, "is_encoder_decoder", False) and is_bidirectional(model):
        return "its attention is bidirectional"
    packing, implementation = packing_of(model), config._attn_implementation
    if packing.unsupported is not None:
        return packing.unsupported
    for module in _decoder(model).modules():
        if (kind := class_of(module)) not in packing.tested and not kind.__module__.startswith(_OF_TOKENS):
            return f"a small copy of it has no {kind.__name__}, which may mix the sequences of a packed row"
    if _runs_variable_length(config):
        return _flash_unsupported(config, packing)
    if implementation in ("sdpa", "eager", PACKED_ATTENTION, None):
        return None
    return f"its attention implementation is {implementation!r}, not 'sdpa', 'eager' or flash attention"


def is_bidirectional(model: PreTrainedModel) -> bool:
    """Whether tokens attend to later ones too, by the model's config.

    Raises: ValueError if only its attention layers say so: masks would make rows with padding causal, and others not.
    """
    config = model.config.get_text_config()
    # Gemma 1 and 2 read the second setting in their layers alone (transformers 5.16-5.23).
    is_set = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if not getattr(config, "is_causal", True) or (is_set and config.model_type not in ("gemma", "gemma2")):
        return True
    is_not_causal = any(getattr(layer, "is_causal", None) is False for layer in model.modules())
    if is_not_causal and packing_of(model).unsupported is None:  # not of an encoder or a vision tower
        raise ValueError(
            f"the attention layers of {type(model).__name__} are bidirectional (is_causal=False), but its masks are "
            "causal. Set model.config.is_causal=False."
        )
    return False


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Switch the model's layers to packed rows; returns whether the rows need a segment table.

    Flash attention chosen by the user stays: it finds the segments from `position_ids`, and prefixes cannot be shared.
    """
    if _runs_variable_length(model.config):
        return False
    if model.config._attn_implementation != PACKED_ATTENTION:
        model.set_attn_implementation(PACKED_ATTENTION)
    # PEFT's copies of layers (layer_replication, modules_to_save) have copies of the config.
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig) and config.model_type == model.config.model_type:
            config._attn_implementation = PACKED_ATTENTION
    cut_into_rows(_decoder(model), packing_of(model).mixers)
    return True


def _runs_variable_length(config: PretrainedConfig) -> bool:
    return str(config._attn_implementation).startswith(VARIABLE_LENGTH_IMPLEMENTATIONS)


def _flash_unsupported(config: PretrainedConfig, packing: Packing) -> str | None:
    if packing.mixers:
        return f"flash attention has no bounds of sequences for {_names(packing.mixers)}. Use 'sdpa'"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "flash attention has no chunks. Use 'sdpa'"
    return None


def _names(mixers: frozenset[type[nn.Module]]) -> str:
    return " and ".join(sorted(mixer.__name__ for mixer in mixers))


# ---- the test


class _Call(NamedTuple):
    """A module's call: tensors `(1, tokens, ...)` that it was given, and that it returned."""

    name: str
    number: int  # of this module's calls
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class _Failed(Exception):
    """A forward raised an error in the module `name`."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(first_line(error))
        self.name = name


def _tested(kind: type[PreTrainedModel], small: PretrainedConfig, config: PretrainedConfig) -> Packing:
    model, problems = None, list[str]()
    for make in (lambda: small, lambda: small_copy(config, narrow=False)):
        try:
            model = small_model(kind, make())
            alone = [_alone(model, segments) for segments in (_PLAIN, _SHARED)]
            break
        except Exception as error:  # an unknown model may raise anything
            problems.append(first_line(error))
    else:
        return Packing(f"a small copy of it could not be run ({problems[0]})")
    mixers, ends_in = frozenset[type[nn.Module]](), _last_norm(model)
    first = leak = _leak(model, _PLAIN, alone[0])
    while leak is not None:
        mixer = type(model.get_submodule(leak[0]))
        can_be_cut = leak[0] and not mixer.__module__.startswith("torch.")  # neither the decoder nor one of PyTorch's
        if not can_be_cut or mixer in mixers or len(mixers) == _MOST_MIXERS:
            name, why = first or leak
            return Packing(
                f"its {type(model.get_submodule(name)).__name__} ({name or 'the decoder'}) {why}", ends_in=ends_in
            )
        mixers |= {mixer}
        cut_into_rows(model, mixers)
        leak = _leak(model, _PLAIN, alone[0])
    tested = frozenset(map(class_of, model.modules()))
    return Packing(None, mixers, _leak(model, _SHARED, alone[1]) is None, ends_in, tested)


def _leak(model: PreTrainedModel, segments: Segments, alone: dict[tuple[str, int], _Call]) -> tuple[str, str] | None:
    """The first module whose output for a packed row is not that for sequences alone, and the problem; None without."""
    try:
        calls = _run(model, _ids(segments), PACKED_ATTENTION, segments)
    except _Failed as error:
        return error.name, f"fails on packed rows ({error})"
    why = "mixes the sequences of a packed row"
    for call in calls:
        expected = alone.get((call.name, call.number))
        if expected is None or not _agree(call.inputs, expected.inputs):
            continue
        if _agree(call.outputs, expected.outputs) is False:
            return call.name, why
    last = calls[-1]
    return None if _agree(last.outputs, alone[last.name, last.number].outputs) else (last.name, why)


def _agree(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> bool | None:
    """Whether tensors agree; None where there are none to compare."""
    if not tensors or [part.shape for part in tensors] != [part.shape for part in expected]:
        return None
    pairs = zip(tensors, expected, strict=True)
    return all(is_close(one, other, tolerance=_TOLERANCE) for one, other in pairs)


def _alone(model: PreTrainedModel, segments: Segments) -> dict[tuple[str, int], _Call]:
    """The calls of all modules for sequences that are run alone, joined as in a packed row."""
    ids, runs = _ids(segments), list[tuple[int, dict[tuple[str, int], _Call]]]()
    for start, length, prefix_start, prefix in segments.rows:
        row = torch.cat([ids[:, prefix_start : prefix_start + prefix], ids[:, start : start + length]], dim=1)
        runs.append((prefix, {(call.name, call.number): call for call in _run(model, row, "eager")}))

    def joined(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Tensors of all runs, without the prompts before branches."""
        cut = [[part[:, prefix:] for part in run] for (prefix, _), run in zip(runs, parts, strict=True)]
        return tuple(
            torch.cat(same, dim=1) for same in zip(*cut, strict=False) if len({x.shape[2:] for x in same}) == 1
        )

    calls = {}
    for place in runs[0][1]:
        every = [run[place] for _, run in runs if place in run]
        if len(every) == len(runs):
            inputs, outputs = joined([call.inputs for call in every]), joined([call.outputs for call in every])
            calls[place] = _Call(*place, inputs, outputs)
    return calls


def _ids(segments: Segments) -> Tensor:
    places = torch.arange(segments.total, device="cpu")
    return (places * 7 % 89 + 3)[None]


def _run(model: PreTrainedModel, ids: Tensor, implementation: str, segments: Segments | None = None) -> list[_Call]:
    """The calls of a forward in the order in which they end. Raises: _Failed."""
    attention = holding(model.config, "_attn_implementation", implementation)
    with _recorded(model, ids.shape[1]) as (calls, running), on_cpu(torch.float64), torch.no_grad(), attention:
        inputs = {"input_ids": ids}
        if segments is not None:
            # A table of its own: plans and calls of a forward, which may fail, are found by the tensor.
            inputs |= {"position_ids": segments.position_ids(), "attention_mask": segments.table.clone()}
        try:
            model(**inputs, use_cache=False)
        except Exception as error:  # an unknown model may raise anything
            raise _Failed(running[-1] if running else "", error) from error
    return calls


@contextmanager
def _recorded(model: nn.Module, tokens: int) -> Iterator[tuple[list[_Call], list[str]]]:
    """A block in which the calls of modules are recorded, and the names of those that run."""
    calls, running, counts = list[_Call](), list[str](), dict[str, int]()

    def of_tokens(values: object) -> tuple[Tensor, ...]:
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        return tuple(part for part in tensors if part.is_floating_point() and part.shape[:2] == (1, tokens))

    def hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: object, kwargs: object) -> None:
            running.append(name)

        def after(module: nn.Module, args: object, kwargs: object, outputs: object) -> None:
            running.pop()
            counts[name] = counts.get(name, 0) + 1
            calls.append(_Call(name, counts[name], of_tokens((args, kwargs)), of_tokens(outputs)))

        return before, after

    handles = []
    for name, module in model.named_modules():
        before, after = hooks(name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield calls, running
    finally:
        for handle in handles:
            handle.remove()


def _last_norm(model: PreTrainedModel) -> str | None:
    """The module whose output, of any of its tokens, is the decoder's."""
    inputs, places = {"input_ids": _ids(_PLAIN)}, torch.tensor([5, 2], device="cpu")
    try:
        leaves = [call for call in _run(model, inputs["input_ids"], "eager") if call.inputs]
        name = next(call.name for call in reversed(leaves) if not [*model.get_submodule(call.name).children()])
        norm = model.get_submodule(name)
        whole = norm.forward
        with on_cpu(torch.float64), torch.no_grad():
            expected = model(**inputs, use_cache=False).last_hidden_state[:, places]
            with replaced_forward(norm, lambda states: whole(states.flatten(0, 1)[places][None])):
                states = model(**inputs, use_cache=False).last_hidden_state
    except Exception:  # an unknown model may raise anything
        return None
    return name if states.shape == expected.shape and torch.equal(states, expected) else None
