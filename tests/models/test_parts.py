"""The parts of a model that several others ask for."""

from types import SimpleNamespace

import pytest
import torch

from tests.architectures import MODEL_TYPES, model_of
from trl.models.parts import embedded_tokens, head_unsupported, logit_rule


def test_a_sharded_embedding_tells_its_whole_shape():
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape = torch.Size([96, 32])  # what ZeRO-3 leaves of a weight that it has shared out
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=weight))
    assert embedded_tokens(model) == 96


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_are_those_of_the_output_head(model_type):
    more = {"lm_head_multiplier": 0.5} if model_type == "falcon_h1" else {}
    model = model_of(model_type, **more)
    assert head_unsupported(model, logit_rule(model.config)) is None
