"""Bad input to step-level PPO: a clear error that names the row, before anything changes."""

import logging

import pytest
import torch
from datasets import Dataset, DatasetDict

from tests.tiny import tiny_model
from tests.trainer.ppo_runs import RESPONSES, batch, make_trainer, tensors, value_model
from trl import PPOConfig, PPOTrainer


def changed(column, row, value):
    """The inputs of a step with one row of one of them changed."""
    inputs = [*batch(), tensors([[1] * len(row) for row in RESPONSES])]
    inputs[column] = list(inputs[column])
    inputs[column][row] = value
    return inputs


BAD = {
    "fewer responses": ([batch()[0], batch()[1][:3], batch()[2]], ValueError, "responses must be batch_size=4 tensors, got 3"),
    "fewer scores": ([*batch()[:2], batch()[2][:3]], ValueError, "scores must be 4, one per response, got 3"),
    "queries in a tensor": ([torch.ones(4, 3, dtype=torch.int64), *batch()[1:]], TypeError, "queries must be a list"),
    "text": (changed(0, 1, "hello"), TypeError, r"queries\[1\] must be a tensor of token ids, got str"),
    "empty response": (changed(1, 2, torch.tensor([], dtype=torch.int64)), ValueError, r"responses\[2\] is empty"),
    "empty query": (changed(0, 3, torch.tensor([], dtype=torch.int64)), ValueError, r"queries\[3\] is empty"),
    "floats for ids": (changed(1, 0, torch.tensor([1.0, 2.0])), TypeError, r"responses\[0\] must hold token ids"),
    "two dimensions": (changed(1, 0, torch.ones(2, 2, dtype=torch.int64)), ValueError, r"responses\[0\] must have one dimension"),
    "unknown token": (changed(1, 1, torch.tensor([5, 96])), ValueError, r"responses\[1\] must have ids from 0 to 95, got 5 to 96"),
    "label of padding": (changed(0, 1, torch.tensor([5, -100])), ValueError, r"queries\[1\] must have ids .*got -100"),
    "too long": (changed(0, 0, torch.ones(254, dtype=torch.int64)), ValueError, "258 tokens, the context length is 256"),
    "NaN score": (changed(2, 1, torch.tensor(float("nan"))), ValueError, r"scores must be finite, got nan \(rows \[1\]\)"),
    "several scores": (changed(2, 0, torch.ones(2)), ValueError, r"scores\[0\] must be one number, got shape \(2,\)"),
    "a score with two dimensions": (changed(2, 0, torch.ones(1, 1)), ValueError, r"scores\[0\] must be one number, got shape \(1, 1\)"),
    "no score": (changed(2, 2, None), TypeError, r"scores\[2\] must be a tensor or a number, got NoneType"),
    "short mask": (changed(3, 0, torch.ones(2)), ValueError, r"response_masks\[0\] must have an entry for each of 4 tokens, got 2"),
    "empty mask": (changed(3, 0, torch.zeros(4)), ValueError, r"response_masks\[0\] must have a 1"),
    "mask of twos": (changed(3, 0, torch.full((4,), 2)), ValueError, r"response_masks\[0\] must be 0 or 1, got \[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_inputs_of_a_step(case):
    inputs, error, words = BAD[case]
    trainer = make_trainer(use_score_scaling=True)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(error, match=words):
        trainer.step(*inputs)
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    assert (trainer.running.count, trainer.current_step, trainer.kl_ctl.value) == (1e-24, 0, 0.2)


def test_responses_that_begin_with_their_queries_are_said_once(caplog):
    queries, responses, scores = batch()
    whole = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
    for given, said in ((responses, 0), ([*whole[:3], responses[3]], 0), (whole, 1)):
        trainer = make_trainer()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                trainer.step(queries, given, scores)
        assert sum("return_prompt=False" in record.message for record in caplog.records) == said


def test_parts_of_a_trainer():
    config, tokenizer = PPOConfig(batch_size=4, mini_batch_size=4), make_trainer().tokenizer
    with pytest.raises(TypeError, match=r"config must be a trl.PPOConfig, got NoneType"):
        PPOTrainer(model=value_model(), tokenizer=tokenizer)
    with pytest.raises(TypeError, match=r"model must be an AutoModelForCausalLMWithValueHead .* got LlamaForCausalLM"):
        PPOTrainer(config, tiny_model("llama"), None, tokenizer)
    with pytest.raises(TypeError, match="tokenizer must be a transformers tokenizer, got NoneType"):
        PPOTrainer(config, value_model())
    with pytest.raises(TypeError, match=r"ref_model must be a model .* got str"):
        PPOTrainer(config, value_model(), "gpt2", tokenizer)
    with pytest.raises(ValueError, match="vocabulary"):
        PPOTrainer(config, value_model(), tiny_model("llama", vocab_size=50), tokenizer)
    with pytest.raises(ValueError, match=r"dataset must have at least batch_size .*, got .*Lower batch_size"):
        PPOTrainer(config, value_model(), None, tokenizer, Dataset.from_dict({"query": ["a"]}))
    with pytest.raises(TypeError, match="rows by number, got IterableDataset"):
        PPOTrainer(
            config,
            value_model(),
            None,
            tokenizer,
            Dataset.from_dict({"query": ["a"] * 4}).to_iterable_dataset(),
        )
    with pytest.raises(TypeError, match="rows by number, got DatasetDict"):
        splits = DatasetDict(train=Dataset.from_dict({"query": ["a"] * 4}))
        PPOTrainer(config, value_model(), None, tokenizer, splits)
    with pytest.raises(ValueError, match="no used column"):
        PPOTrainer(config, value_model(), None, tokenizer, Dataset.from_dict({"text": ["a"] * 4}))


def test_an_optimiser_and_a_schedule_that_would_do_nothing():
    config, tokenizer = PPOConfig(batch_size=4, mini_batch_size=4), make_trainer().tokenizer
    model = value_model()
    elsewhere = torch.optim.SGD(value_model().parameters(), lr=0.1)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer has no parameter of model"):
        PPOTrainer(config, model, None, tokenizer, optimizer=elsewhere)
    schedule = torch.optim.lr_scheduler.ExponentialLR(elsewhere, 0.5)
    for optimizer, given in ((None, "no optimizer"), (own, "another optimizer")):
        with pytest.raises(ValueError, match=f"lr_scheduler belongs to an optimizer of its own, and {given}"):
            PPOTrainer(config, model, None, tokenizer, optimizer=optimizer, lr_scheduler=schedule)


def test_a_divergence_that_explodes_stops_before_the_update():
    policy, far = value_model(), value_model(seed=1)
    with torch.no_grad():
        far.get_base_model().lm_head.weight.mul_(30)
    trainer = make_trainer(policy, far)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(
        FloatingPointError,
        match=r"KL divergence from the reference has exploded in step 1.*Lower learning_rate",
    ):
        trainer.step(*batch())
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())


def test_a_loss_that_is_no_number_stops_before_the_update():
    trainer = make_trainer()
    head = trainer.model.v_head.summary.weight
    before = {name: weight.clone() for name, weight in trainer.model.pretrained_model.state_dict().items()}
    with torch.no_grad():
        head.fill_(torch.inf)
    with pytest.raises((FloatingPointError, ValueError)):
        trainer.step(*batch())
    now = trainer.model.pretrained_model.state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in now.items())


def test_a_negative_and_a_large_divergence_are_said_once(caplog):
    queries, _, scores = batch()
    said = []
    for seeds in ((0, 1), (1, 0)):
        trainer = make_trainer(*(value_model(seed=seed) for seed in seeds), target=0.01)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                trainer.step(queries, batch()[1], scores)
        said += [record.message for record in caplog.records if "KL divergence is" in record.message]
        caplog.clear()
    assert sum("negative" in message and "top_k=0" in message for message in said) == 1
    assert sum("times the target of 0.01" in message for message in said) >= 1
    assert len(said) == len(set(said))


def test_arguments_of_the_dataset_level_name_its_place():
    with pytest.raises(
        TypeError,
        match=r"got num_ppo_epochs, output_dir, which .* Use PPOConfig and PPOTrainer of trl.experimental.ppo",
    ):
        PPOConfig(output_dir="out", num_ppo_epochs=4)  # pyright: ignore
