"""Reward models: scores of the model's own forward, whatever the batch; texts and ids; goldens of the reference."""

import logging

import pytest
import torch

from tests.golden.runs import REWARDS, Assets, cases_of
from tests.tiny import tiny_classifier, tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl.rewards import ModelSource, RewardError, RewardInputs, RewardSources

PROMPTS = ["Is the sky", "An apple", "Is the sky", "Is the sky", "An apple"]
COMPLETIONS = [" blue?", " falls down. Look up.", " a sea?", "", " and 12 pears"]
# Scores of float32: sums over some hundred products, in whatever order the kernels of the machine add them.
FLOAT32 = {"rel": 1e-5, "abs": 1e-5}
CHAT = [[{"role": "user", "content": text}] for text in PROMPTS]


def make(architecture="qwen2", tokenizer=None, **options):
    tokenizer = tokenizer or tiny_tokenizer()
    return tiny_classifier(architecture, vocab_size=len(tokenizer), num_labels=1, **options), tokenizer


def alone(model, tokenizer, texts):
    """The model's own score of each text, without padding."""
    model.config.pad_token_id = None
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits.item() for row in ids]


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "bloom"])
@pytest.mark.parametrize("batch_size", [2, 32])
def test_scores_are_those_of_each_text_alone(architecture, batch_size):
    model, tokenizer = make(architecture)
    expected = alone(model, tokenizer, [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    source = ModelSource(model, tokenizer, batch_size=batch_size)
    assert source.score(RewardInputs(PROMPTS, COMPLETIONS)) == pytest.approx(expected, **FLOAT32)


def test_messages_are_rendered_by_the_models_own_template():
    model, tokenizer = make()
    completions = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    texts = [tokenizer.apply_chat_template(p + c, tokenize=False) for p, c in zip(CHAT, completions, strict=True)]
    expected = alone(model, tokenizer, texts)
    source = ModelSource(model, tokenizer)
    assert source.score(RewardInputs(CHAT, completions)) == pytest.approx(expected, **FLOAT32)
    assert source.score(RewardInputs(CHAT, COMPLETIONS)) == pytest.approx(expected, **FLOAT32)


def test_ids_are_read_as_they_are_where_the_tokenizer_is_the_policys():
    model, tokenizer = make()
    prompt_ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    completion_ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in COMPLETIONS]
    source = ModelSource(model, tokenizer, read="ids", policy_tokenizer=tiny_tokenizer())
    inputs = RewardInputs(PROMPTS, COMPLETIONS, completion_ids, prompt_ids)
    model.config.pad_token_id = None
    with torch.no_grad():
        rows = [p + c for p, c in zip(prompt_ids, completion_ids, strict=True)]
        expected = [model(input_ids=torch.tensor([row])).logits.item() for row in rows]
    assert source.score(inputs) == pytest.approx(expected, **FLOAT32)


def test_the_text_is_tokenised_again_for_another_tokenizer_and_said_once(caplog):
    model, tokenizer = make()
    policy = tiny_tokenizer()
    policy.add_tokens(["sky"])
    with caplog.at_level(logging.WARNING):
        source = ModelSource(model, tokenizer, name="judge", read="ids", policy_tokenizer=policy)
        inputs = RewardInputs(PROMPTS, COMPLETIONS, [[0]] * 5, [[0]] * 5)
        found = [source.score(inputs), source.score(inputs)]
    expected = alone(model, tokenizer, [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    assert found[0] == found[1] == pytest.approx(expected, **FLOAT32)
    assert len([r for r in caplog.records if "another tokenizer than the policy" in r.message]) == 1


def test_shared_prompts_are_run_once():
    model, tokenizer = make()
    seen = []
    source = ModelSource(model, tokenizer)
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    prompt = "An apple and 12 pears. How many apples are left? " * 4
    source.score(RewardInputs([prompt] * 8, [f" {n}" for n in range(8)]))
    one = len(tokenizer(prompt)["input_ids"])
    assert len(seen) == 1
    assert seen[0] < one + 8 * 6


def test_a_saved_model_comes_with_its_tokenizer_and_name(tmp_path):
    model, tokenizer = make()
    folder = tmp_path / "my-judge"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sources = RewardSources([str(folder)])
    assert sources.names == ("my-judge",)
    assert sources.models == sources.sources
    saved = sources.models[0].tokenizer  # transformers may load it as another class, which splits digits
    expected = alone(model, saved, [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    scores = sources.score(RewardInputs(PROMPTS, COMPLETIONS)).scores[:, 0].tolist()
    assert scores == pytest.approx(expected, **FLOAT32)


def test_models_that_cannot_give_one_reward_are_refused(tmp_path, caplog):
    tokenizer = tiny_tokenizer()
    two = tiny_classifier("qwen2", vocab_size=len(tokenizer), num_labels=2)
    two.save_pretrained(tmp_path / "two")
    tokenizer.save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match=r"num_labels=1 .*got 2"):
        ModelSource(two, tokenizer)
    with pytest.raises(ValueError, match="has 2 labels, expected 1"):
        ModelSource(str(tmp_path / "two"))
    policy = tiny_model("qwen2", vocab_size=len(tokenizer))
    with pytest.raises(TypeError, match="expected a reward model"):
        ModelSource(policy, tokenizer)
    policy.save_pretrained(tmp_path / "policy")
    with caplog.at_level(logging.WARNING):
        ModelSource(str(tmp_path / "policy"), tokenizer)
    assert "its head is new, and its scores are random" in caplog.text
    with pytest.raises(ValueError, match="no name to find its tokenizer"):
        ModelSource(make()[0])
    with pytest.raises(ValueError, match="needs policy_tokenizer"):
        ModelSource(make()[0], tokenizer, read="ids")


def test_bad_rows_are_named():
    model, tokenizer = make()
    with pytest.raises(RewardError, match="no token in row 1"):
        RewardSources(ModelSource(model, tokenizer)).score(RewardInputs(["a", ""], ["b", ""]))
    with pytest.raises(RewardError, match="chat template"):
        RewardSources(ModelSource(model, tiny_tokenizer("none"))).score(RewardInputs(CHAT, COMPLETIONS))
    with pytest.raises(RewardError, match="expected two texts or two lists of messages"):
        RewardSources(ModelSource(model, tokenizer)).score(RewardInputs(["a"], [CHAT[0]]))
    larger = tiny_tokenizer()
    larger.add_tokens(["blue"])
    with pytest.raises(RewardError, match=f"token {len(tokenizer)} in row 0.*model's own tokenizer"):
        RewardSources(ModelSource(model, larger)).score(RewardInputs(PROMPTS, COMPLETIONS))
    short, tokenizer = make("gpt2", n_positions=4, max_position_embeddings=4)
    with pytest.raises(RewardError, match="tokens in row 1, expected at most 4"):
        RewardSources(ModelSource(short, tokenizer)).score(RewardInputs(["a", "An apple " * 3], ["b", "c"]))


GOLDEN = ("reward_model", "chat_reward_model", "reward_none", "chat")


@pytest.mark.parametrize("case", GOLDEN)
def test_scores_and_metrics_of_the_reference(case):
    """The scripted rollouts of the recorded GRPO runs, four steps of two prompts with four completions each."""
    assets, spec = Assets(), cases_of("trainers")[f"grpo/{case}"]
    name, recorded = spec["dataset"], spec["result"]["steps"]
    prompts = [row["prompt"] for row in assets.rows(name, spec["rows"])]
    scripts, tokenizer = assets.scripts(name), assets.tokenizer("tok")
    sources = RewardSources([REWARDS[reward] for reward in spec["rewards"]])
    for step in range(4):
        rows = [row for row in (2 * step, 2 * step + 1) for _ in range(4)]
        ids = [scripts[row][k] for row, k in zip(rows, [0, 1, 2, 3] * 2, strict=True)]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        if name == "prompt_chat":
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        result = sources.score(RewardInputs([prompts[row] for row in rows], texts, ids))
        assert result.rewards.mean().item() == pytest.approx(recorded[step]["reward"], **FLOAT32)
        for metric, value in result.metrics().items():
            expected = float(recorded[step].get(metric, "nan"))
            assert value == pytest.approx(expected, **FLOAT32, nan_ok=True), metric
