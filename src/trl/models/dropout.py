"""Dropout switched off by its probability, so that `model.train()` does not switch it on again."""

from collections.abc import Iterator

import torch

# Attributes of layers that drop by calling a function: of the attention of Llama and its kin, of OPT and BART.
_PROBABILITIES = ("attention_dropout", "dropout", "activation_dropout")
_OTHER_NOISE = ("layerdrop", "jitter_noise")


def disable_dropout_in_model(model: torch.nn.Module) -> None:
    """Set the probability of every dropout in `model` to 0, in place."""
    for module, name in _probabilities(model):
        setattr(module, name, 0.0)


def has_noise(model: torch.nn.Module) -> bool:
    """Whether two forwards in training mode may differ: dropout, layers left out, or a router's jitter."""
    return any(map(is_noisy, model.modules()))


def is_noisy(module: torch.nn.Module) -> bool:
    """The same of a module by itself, without those inside of it."""
    if any(getattr(module, name) for name in _probability_names(module)):
        return True
    return any(getattr(module, name, 0.0) for name in _OTHER_NOISE)


def _probabilities(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    for module in model.modules():
        for name in _probability_names(module):
            yield module, name


def _probability_names(module: torch.nn.Module) -> Iterator[str]:
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        yield "p"
    for name in _PROBABILITIES:
        if isinstance(module.__dict__.get(name), float):
            yield name
