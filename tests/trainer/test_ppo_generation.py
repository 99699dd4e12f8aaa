"""Responses of step-level PPO in every documented form."""

import logging

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import GenerationConfig

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.ppo_runs import QUERIES, make_trainer, tensors, value_model
from trl import AutoModelForCausalLMWithValueHead

GREEDY = {"do_sample": False, "max_new_tokens": 6}


def by_hand(model, query, **kwargs):
    """The model's own greedy completion, with the query."""
    mask = torch.ones_like(query)[None]
    return model.pretrained_model.generate(query[None], attention_mask=mask, pad_token_id=0, **{**GREEDY, **kwargs})[0]


def test_a_list_gives_a_list_with_or_without_the_queries():
    model = value_model()
    trainer, queries = make_trainer(model), tensors(QUERIES)
    expected = [by_hand(model, query) for query in queries]
    whole = trainer.generate(queries, **GREEDY)
    alone = trainer.generate(queries, return_prompt=False, **GREEDY)
    for query, found, response, wanted in zip(queries, whole, alone, expected, strict=True):
        assert found.tolist() == wanted.tolist()
        assert response.tolist() == wanted[len(query) :].tolist()


def test_a_single_query_gives_one_row_and_rows_give_a_table():
    model = value_model()
    trainer, query = make_trainer(model), torch.tensor(QUERIES[0])
    assert trainer.generate(query, **GREEDY).tolist() == [by_hand(model, query).tolist()]
    assert trainer.generate(query, return_prompt=False, eos_token_id=[], **GREEDY).shape == (1, 6)
    table = trainer.generate(torch.tensor([QUERIES[0], [9, 9, 9]]), eos_token_id=[], **GREEDY)
    assert table.shape == (2, 9)


def test_responses_end_with_their_end_token():
    model = value_model()
    query = torch.tensor(QUERIES[0])
    end = int(by_hand(model, query)[4])
    trainer = make_trainer(model)
    found = trainer.generate([query], return_prompt=False, eos_token_id=end, **GREEDY)[0]
    assert found.tolist().count(end) == 1 and found[-1] == end


def test_beams_are_refused():
    with pytest.raises(ValueError, match="num_beams"):
        make_trainer().generate(tensors(QUERIES), num_beams=3, **GREEDY)


def test_settings_of_the_models_own_config_that_rollouts_lack_are_left_out_which_is_said_once(caplog):
    model, queries = value_model("bart"), tensors(QUERIES)
    trainer = make_trainer(model)
    expected = trainer.generate(queries, **GREEDY)
    own = model.pretrained_model.generation_config
    own.forced_eos_token_id, own.num_beams, own.remove_invalid_values = 2, 4, True
    with caplog.at_level(logging.WARNING):
        found = [trainer.generate(queries, **GREEDY) for _ in range(2)]
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, expected, strict=True))
    (said,) = [record.getMessage() for record in caplog.records if "rollouts" in record.getMessage()]
    assert "forced_eos_token_id=2" in said and "num_beams=4" in said
    own.forced_bos_token_id = 7  # read by the model itself
    assert all(row[1] == 7 for row in trainer.generate(queries, **GREEDY))
    with pytest.raises(ValueError, match="forced_eos_token_id"):
        trainer.generate(queries, forced_eos_token_id=2, **GREEDY)


@pytest.mark.parametrize("more", [{}, {"typical_p": 0.9}])
def test_samples_are_new_in_each_call_and_the_same_for_a_seed(more):
    trainer, queries = make_trainer(), tensors(QUERIES)
    kwargs = {"do_sample": True, "top_k": 0.0, "top_p": 1.0, "min_length": -1, "max_new_tokens": 8, **more}
    torch.manual_seed(5)
    first, second = (trainer.generate(queries, **kwargs) for _ in range(2))
    torch.manual_seed(5)
    again = trainer.generate(queries, **kwargs)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("adapter", [False, True])
def test_the_references_responses_come_beside_the_policys(adapter):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=64, init_lora_weights=False)
    policy, reference = value_model(**({"peft_config": config} if adapter else {})), value_model(seed=1)
    plain = value_model() if adapter else reference
    trainer, queries = make_trainer(policy, None if adapter else reference), tensors(QUERIES)
    own, ref = trainer.generate(queries, generate_ref_response=True, **GREEDY)
    for query, response, ref_response in zip(queries, own, ref, strict=True):
        assert response.tolist() == by_hand(policy, query).tolist()
        assert ref_response.tolist() == by_hand(plain, query).tolist()
    assert [row.tolist() for row in own] != [row.tolist() for row in ref]
    assert [row.tolist() for row in trainer.generate(queries, **GREEDY)] == [row.tolist() for row in own]


def test_an_encoder_decoders_responses_begin_with_its_start_token_and_train():
    model = value_model("t5")
    trainer, queries = make_trainer(model), tensors(QUERIES)
    found = trainer.generate(queries, eos_token_id=[], **GREEDY)
    for query, response in zip(queries, found, strict=True):
        assert response.tolist() == by_hand(model, query, eos_token_id=None).tolist()[: len(response)]
        assert response[0] == model.config.decoder_start_token_id
    with_start = trainer.step(queries, found, [1.0, 0.0, 2.0, 1.0])
    without = make_trainer(value_model("t5")).step(queries, [row[1:] for row in found], [1.0, 0.0, 2.0, 1.0])
    assert with_start["ppo/loss/total"] == pytest.approx(without["ppo/loss/total"], rel=1e-6)
    assert with_start["tokens/responses_len_mean"] == 6


@pytest.mark.parametrize(
    ("query", "error", "words"),
    [
        (torch.ones(256, dtype=torch.int64), ValueError, r"queries\[1\] has 256 tokens, the context length is 256"),
        (torch.tensor([5, 96]), ValueError, r"queries\[1\] must have ids from 0 to 95, got 5 to 96"),
        (torch.tensor([5.5]), TypeError, r"queries\[1\] must hold token ids"),
        (torch.tensor([], dtype=torch.int64), ValueError, r"queries\[1\] is empty"),
        ("hello", TypeError, r"queries\[1\] must be a tensor of token ids, got str"),
    ],
)  # fmt: skip
def test_queries_that_cannot_be_read_are_named(query, error, words):
    with pytest.raises(error, match=words):
        make_trainer(value_model("gpt2")).generate([torch.tensor([5]), query], **GREEDY)


def test_responses_end_at_the_models_window():
    query = torch.arange(250) % 90 + 3
    found = make_trainer(value_model("gpt2")).generate(
        [query], return_prompt=False, eos_token_id=-1, max_new_tokens=40, do_sample=False
    )
    assert len(found[0]) == 6


def test_a_generation_config_counts_as_its_arguments():
    trainer, queries = make_trainer(), tensors(QUERIES)
    config = GenerationConfig(do_sample=False, max_new_tokens=6, max_length=5)  # the former counts
    for more in ({}, {"max_new_tokens": 3}):  # single arguments win
        wanted = trainer.generate(queries, **{**GREEDY, **more})
        found = trainer.generate(queries, generation_config=config, **more)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_without_an_end_token_responses_have_their_full_length_which_is_said_once(caplog):
    inner, tokenizer = tiny_model("llama", eos_token_id=None, pad_token_id=None), tiny_tokenizer()
    inner.generation_config.eos_token_id = tokenizer.eos_token = tokenizer.pad_token = None
    trainer = make_trainer(AutoModelForCausalLMWithValueHead.from_pretrained(inner), tokenizer=tokenizer)
    queries = tensors(QUERIES)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = trainer.generate(queries, return_prompt=False, do_sample=True, max_new_tokens=6)
    assert [len(response) for response in found] == [6] * 4
    assert sum("no end token" in record.message for record in caplog.records) == 1
    stats = trainer.step(queries, found, [1.0, 0.0, 1.0, 0.0])
    assert np.isfinite(stats["ppo/loss/total"])
