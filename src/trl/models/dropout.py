"""Dropout switched off by its probability, so that `model.train()` does not switch it on again."""

import torch

# Attributes of layers that drop by calling a function: of the attention of Llama and its kin, of OPT and BART.
_PROBABILITIES = ("attention_dropout", "dropout", "activation_dropout")


def disable_dropout_in_model(model: torch.nn.Module) -> None:
    """Set the probability of every dropout in `model` to 0, in place."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _PROBABILITIES:
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.0)
