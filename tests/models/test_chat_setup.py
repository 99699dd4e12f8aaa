"""Chat templates given to base models: tokens, embedding rows, configs."""

import pytest
import torch

from tests.models.words import WORDS, word_tokenizer
from tests.tiny import tiny_model
from trl.models.chat_setup import ChatMlSpecialTokens, clone_chat_template, setup_chat_format

MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
CHATML = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat<|im_end|>\n"
N = len(WORDS)


@pytest.fixture
def source(tmp_path):
    """A tokenizer folder with ChatML's tokens; `</s>`, which it adds too, the target has already."""
    tokenizer = word_tokenizer(special_tokens=("<|im_start|>", "<|im_end|>"), pad_token="<pad>")
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = ChatMlSpecialTokens().chat_template
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_clone_adds_rows_at_the_mean(source, tied):
    model = tiny_model("llama", vocab_size=N, tie_word_embeddings=tied)
    before = model.get_input_embeddings().weight.detach().clone()
    head_before = model.lm_head.weight.detach().clone()
    model, tokenizer, added = clone_chat_template(model, word_tokenizer(eos_token="</s>"), source, 8)
    assert added == [N, N + 1]
    assert tokenizer.convert_ids_to_tokens(added) == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == CHATML
    weight, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert weight.shape == head.shape == (16, 32)
    assert model.config.vocab_size == 16
    assert (weight is head) == tied
    assert torch.equal(weight[:N], before)
    torch.testing.assert_close(weight[N:], before.mean(dim=0).expand(5, -1), atol=1e-7, rtol=0)
    torch.testing.assert_close(head[N:], head_before.mean(dim=0).expand(5, -1), atol=1e-7, rtol=0)


def test_clone_sets_eos_and_pad_everywhere(source):
    model, tokenizer, (_, end) = clone_chat_template(
        tiny_model("llama", vocab_size=N), word_tokenizer(eos_token="</s>"), source
    )
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (end, 0)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (end, end)
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (0, 0)
    assert model.get_input_embeddings().num_embeddings == 64


def test_clone_uses_spare_rows_and_never_shrinks(source):
    model = tiny_model("llama", vocab_size=90)
    before = model.get_input_embeddings().weight.detach().clone()
    model, _, added = clone_chat_template(model, word_tokenizer(), source, 16)
    weight = model.get_input_embeddings().weight
    assert weight.shape[0] == 90
    torch.testing.assert_close(weight[added], before[:N].mean(dim=0).expand(2, -1), atol=1e-7, rtol=0)
    assert torch.equal(weight[N + 2 :], before[N + 2 :])


def test_clone_needs_a_template(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        clone_chat_template(tiny_model("llama"), word_tokenizer(), str(tmp_path))


def test_setup_chat_format():
    model, tokenizer = setup_chat_format(tiny_model("llama", vocab_size=N), word_tokenizer(), resize_to_multiple_of=4)
    start, end = N, N + 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (start, end, end)
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (
        start,
        end,
        end,
    )
    assert model.generation_config.eos_token_id == end
    assert model.get_input_embeddings().num_embeddings == 16
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == CHATML
    with pytest.raises(ValueError, match="has a chat template"):
        setup_chat_format(model, tokenizer)
