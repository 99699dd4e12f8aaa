"""RewardTrainer: one gradient however a step is cut and laid out, the model's own scores, heads that are kept.

float64; gradients agree to 1e-10 of the largest gradient, losses and metrics to 1e-12.
"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.tiny import tiny_classifier, tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.one_step import SETTINGS, assert_same_gradient
from tests.trainer.resume_worker import tokenizer
from tests.trainer.reward_runs import make, reward_model, rows
from tests.trainer.test_invariance import SPLITS
from trl.reporting.metrics import compute_accuracy
from trl.trainer.prm_config import PRMConfig
from trl.trainer.prm_trainer import PRMTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

METRICS = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens")
LAYOUTS = {
    "multiple": {"pad_to_multiple_of": 32, **SPLITS["2x4"]},
    "offloaded": {"activation_offloading": True},
}
TEXT = [
    {"prompt": "What colour is the sky?", "chosen": " It is blue.", "rejected": " It is a cloud."},
    {"prompt": "And then?", "chosen": " Look up.", "rejected": " Nothing."},
] * 2


def step(**settings):
    """The gradient and the log of one step with a centred loss."""
    trainer = make(**{"center_rewards_coefficient": 0.1, **settings})
    trainer.train()
    (gradients,) = trainer.keep.steps
    return gradients, trainer.state.log_history[0]


@pytest.fixture(scope="module")
def whole():
    return step()


def assert_same(found, expected):
    assert_same_gradient(found[0], expected[0])
    assert_same_metrics(found[1], expected[1])


def assert_same_metrics(found, expected):
    """To 1e-12; the loss, which transformers sums in float32, to 1e-6."""
    for name in METRICS:
        assert found[name] == pytest.approx(expected[name], rel=1e-6 if name == "loss" else 1e-12, abs=1e-12), name


def own_rewards(model, data, pad=0):
    """The rewards `(N, 2)` of the model's own forward on padded rows."""
    sequences = [row[side] for row in data for side in ("chosen_input_ids", "rejected_input_ids")]
    width = max(map(len, sequences))
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids in sequences])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
    return model(input_ids=ids, attention_mask=mask).logits[:, 0].view(-1, 2)


def loaded(folder):
    """The saved reward model, in float64."""
    return AutoModelForSequenceClassification.from_pretrained(folder).double()


# ---- one gradient


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, whole):
    assert_same(step(**LAYOUTS[layout]), whole)


def test_a_plain_loop_gives_this_gradient(whole):
    """Nothing of ours: the mean over pairs of -log sigmoid(r_c - r_r - margin) + 0.1 (r_c + r_r)^2, on padded rows."""
    model, data = reward_model(), rows()
    chosen, rejected = own_rewards(model, data).unbind(dim=1)
    margin = torch.tensor([row["margin"] for row in data], dtype=torch.float64)
    losses = -torch.log(torch.sigmoid(chosen - rejected - margin)) + 0.1 * (chosen + rejected) ** 2
    losses.mean().backward()
    assert_same_gradient(whole[0], {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    losses, pairs = losses.detach(), torch.stack([chosen, rejected], dim=1).detach()
    expected = {
        "loss": losses.mean(),
        "accuracy": (chosen > rejected).double().mean(),
        "margin": (pairs[:, 0] - pairs[:, 1]).mean(),
        "min_reward": pairs.min(),
        "mean_reward": pairs.mean(),
        "max_reward": pairs.max(),
        "num_tokens": sum(len(row[side]) for row in data for side in ("chosen_input_ids", "rejected_input_ids")),
    }  # fmt: skip
    assert_same_metrics(whole[1], {name: float(value) for name, value in expected.items()})


def test_extremes_are_those_since_the_last_log():
    """Two steps in one log: every other metric is the mean of what the steps log alone."""
    once = make(max_steps=2, logging_steps=1, learning_rate=0.01)
    both = make(max_steps=2, logging_steps=2, learning_rate=0.01, **SPLITS["4x2"])
    for trainer in (once, both):
        trainer.train()
    first, second = once.state.log_history[:2]
    for name in METRICS[1:-1]:
        of = {"min_reward": min, "max_reward": max}.get(name, lambda a, b: (a + b) / 2)
        assert both.state.log_history[0][name] == pytest.approx(of(first[name], second[name]), rel=1e-10), name  # fmt: skip


def test_encoders_are_scored_as_they_are(caplog):
    """A BERT takes padded rows only; said once, and the same loss in every split."""
    options = {"pad_token_id": 0}
    with caplog.at_level("WARNING"):
        found = [step(model=reward_model("bert", **options), **SPLITS[split]) for split in ("1x8", "4x2")]
    assert "BertForSequenceClassification" in caplog.text
    assert_same(found[1], found[0])
    with pytest.raises(ValueError, match="prefix_sharing=True, but BertForSequenceClassification"):
        make(model=reward_model("bert", **options), prefix_sharing=True)


# ---- evaluation


def test_compute_metrics_gets_both_rewards_of_each_pair():
    model, seen = reward_model(), []

    def metrics(found):
        seen.append(found)
        return {**compute_accuracy(found), "margin": 17.0}

    trainer = make(model=model, compute_metrics=metrics, per_device_eval_batch_size=3)
    result = trainer.evaluate(Dataset.from_list(rows()))
    with torch.no_grad():
        expected = own_rewards(model, rows())
    assert seen[0].predictions == pytest.approx(expected.numpy(), rel=1e-10)
    assert seen[0].label_ids.tolist() == [0] * 8
    assert result["eval_accuracy"] == pytest.approx((expected[:, 0] > expected[:, 1]).double().mean().item())
    assert result["eval_margin"] == 17.0  # the user's own name


def test_samples_are_shown(capsys):
    trainer = make(eval_dataset=Dataset.from_list(rows()), per_device_eval_batch_size=2)
    trainer.model.train()
    state = trainer.accelerator.gradient_state
    before = state.active_dataloader
    trainer.evaluate(num_print_samples=3)
    shown = capsys.readouterr().out
    words = tokenizer().decode(rows()[2]["chosen_input_ids"]).split()
    assert "chosen_text" in shown and "rejected_text" in shown and "logits" in shown
    assert words[0] in shown
    assert state.active_dataloader in (before, None)  # not that of the samples, which was left before its end
    assert shown.count("[-") + shown.count("[0") + shown.count("[1") + shown.count("[2") == 3
    with pytest.raises(ValueError, match="eval_dataset, got None"):
        make().visualize_samples(1)


# ---- models


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A language model's folder: no head for rewards."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", vocab_size=400, pad_token_id=7).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def from_path(folder, out, kinds=(RewardTrainer, RewardConfig), data=TEXT, peft_config=None, **settings):
    trainer, config = kinds
    args = config(str(out), **{**SETTINGS, "max_steps": 3, "learning_rate": 0.05, **settings})
    return trainer(str(folder), args, train_dataset=Dataset.from_list(data), peft_config=peft_config)


def test_a_language_models_files_get_a_head_that_depends_on_the_seed_alone(base, tmp_path):
    heads = []
    for seed, noise in ((1, 0), (1, 5), (2, 5)):
        torch.manual_seed(noise)
        heads.append(from_path(base, tmp_path, seed=seed).model.score.weight)
    assert heads[0].shape == (1, 32)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])


def test_a_head_for_more_classes_is_refused_or_drawn_anew(tmp_path):
    tiny_classifier("llama", vocab_size=400, num_labels=2, pad_token_id=7).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="has weights of other sizes than its config with num_labels=1, as a reward model"
    ):
        from_path(tmp_path, tmp_path / "out")
    trainer = from_path(tmp_path, tmp_path / "out", model_init_kwargs={"ignore_mismatched_sizes": True})
    assert trainer.model.score.weight.shape == (1, 32)


def lora(**changes):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "SEQ_CLS", **changes})  # fmt: skip


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "CAUSAL_LM", None])
def test_an_adapter_trains_and_keeps_the_head(task_type, base, tmp_path, caplog):
    config = lora(task_type=task_type)
    with caplog.at_level("WARNING"):
        trainer = from_path(base, tmp_path, peft_config=config)
    assert ("peft_config has task_type=CAUSAL_LM" in caplog.text) == (task_type == "CAUSAL_LM")
    assert config.task_type == task_type  # the user's own object stays
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert sum("lora" in name for name in trained) == 8
    assert [name for name in trained if "lora" not in name] == ["base_model.model.score.modules_to_save.default.weight"]  # fmt: skip
    before = trainer.model.base_model.model.score.modules_to_save.default.weight.clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.base_model.model.score.modules_to_save.default.weight)
    trainer.save_model()
    assert any("score" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    base_model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    again = PeftModel.from_pretrained(base_model, tmp_path).double()
    trainer.model.double()
    batch = trainer.data_collator(list(trainer.train_dataset))
    with torch.no_grad():
        found, expected = trainer.method.score(batch, trainer.scoring()), own_rewards(again, trainer.train_dataset)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_without_the_head_is_told_of(caplog):
    model = get_peft_model(reward_model("llama", dtype=torch.float32), LoraConfig(target_modules=["q_proj"]))
    with caplog.at_level("WARNING"):
        make(model=model)
    assert "The adapter leaves the head" in caplog.text


# ---- bad input


@pytest.mark.parametrize(
    ("trainer", "config", "of_tokens", "expected"),
    [(RewardTrainer, RewardConfig, False, "1 for a reward model"), (PRMTrainer, PRMConfig, True, "2 for a classifier of steps")],
)  # fmt: skip
def test_models_of_other_kinds(trainer, config, of_tokens, expected):
    other = "LlamaForSequenceClassification" if of_tokens else "LlamaForTokenClassification"
    kind = expected.partition(" for ")[2]
    for model, error, message in (
        (tiny_classifier("llama", of_tokens=of_tokens), ValueError, f"num_labels={expected}, got 3"),
        (tiny_classifier("llama", of_tokens=not of_tokens), TypeError, f"{other}, expected"),
        (tiny_model("llama"), TypeError, f"LlamaForCausalLM, expected {kind}"),
    ):
        with pytest.raises(error, match=message):
            trainer(model, config("unused", use_cpu=True), processing_class=tokenizer())


def test_settings_that_cannot_be(base):
    with pytest.raises(ValueError, match="num_labels=1, got 2"):
        RewardTrainer(str(base), RewardConfig("unused", model_init_kwargs={"num_labels": 2}, use_cpu=True))
    with pytest.raises(TypeError, match="max_lenght"):
        RewardTrainer(str(base), RewardConfig("unused", use_cpu=True), max_lenght=3)
