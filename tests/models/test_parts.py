"""The parts of a model that several others ask for."""

from types import SimpleNamespace

import torch

from tests.tiny import tiny_model, tiny_seq2seq
from trl.models.parts import embedded_tokens


def test_embedded_tokens_are_the_rows_of_the_embedding():
    model = tiny_model("llama")
    assert embedded_tokens(model) == 96
    model.resize_token_embeddings(101)
    assert embedded_tokens(model) == 101
    assert embedded_tokens(tiny_seq2seq("t5")) == 96


def test_a_sharded_embedding_tells_its_whole_shape():
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape = torch.Size([96, 32])  # what ZeRO-3 leaves of a weight that it has shared out
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=weight))
    assert embedded_tokens(model) == 96
