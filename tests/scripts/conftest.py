"""Models that commands train in tests."""

import pytest

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=400).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)
