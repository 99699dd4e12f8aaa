"""The parts of a model that several others ask for."""

from types import SimpleNamespace

import torch

from trl.models.parts import embedded_tokens


def test_a_sharded_embedding_tells_its_whole_shape():
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape = torch.Size([96, 32])  # what ZeRO-3 leaves of a weight that it has shared out
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=weight))
    assert embedded_tokens(model) == 96
