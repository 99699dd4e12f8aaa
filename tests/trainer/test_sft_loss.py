"""What SFTTrainer minimises and measures, against the same written out in plain PyTorch.

float64 and rtol 1e-9 where the model computes in it (logged losses pass through transformers' float32 sum: 1e-6).
"""

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer.one_step import KeepGradients, fixed_rows
from tests.trainer.resume_worker import tokenizer
from tests.trainer.sft_runs import config, logged
from trl import SFTTrainer

ROWS = fixed_rows()
TRAINED = sum(sum(row["completion_mask"][1:]) for row in ROWS)


def model64(**overrides):
    return tiny_model("llama", dtype=torch.float64, **overrides)


def build(model=None, rows=ROWS, **given):
    """A trainer over the eight fixed rows and its gradients; `given` are arguments of trainer or config."""
    names = (
        "compute_loss_func",
        "compute_metrics",
        "preprocess_logits_for_metrics",
        "eval_dataset",
        "callbacks",
    )
    arguments = {name: given.pop(name) for name in names if name in given}
    keep = KeepGradients()
    settings = {
        "per_device_train_batch_size": 8,
        "max_steps": 1,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        **given,
    }
    trainer = SFTTrainer(
        model64() if model is None else model,
        config(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        **{**arguments, "callbacks": [keep, *arguments.get("callbacks", [])]},
    )
    return trainer, keep


def plain_tokens(model, rows=ROWS):
    """For each row: logits that predict trained tokens `(K, V)` and these tokens; and the logits of all tokens."""
    scored, everything = [], []
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        logits = model(input_ids=ids[None]).logits[0]
        trained = torch.tensor(row["completion_mask"][1:]).bool()
        scored.append((logits[:-1][trained], ids[1:][trained]))
        everything.append(logits)
    logits, targets = (torch.cat(part) for part in zip(*scored, strict=True))
    return logits, targets, torch.cat(everything)


def assert_gradients(keep, model, tolerance=1e-9):
    size = max(p.grad.abs().max() for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert (keep.steps[0][name] - parameter.grad).abs().max().item() <= tolerance * size, name


SPLITS = [
    {},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "padding_free": True},
]


# ---- losses


@pytest.mark.parametrize("split", SPLITS, ids=["1x8", "4x2", "2x4 padding-free"])
def test_dft(split):
    trainer, keep = build(loss_type="dft", **split)
    trainer.train()
    model = model64()
    logits, targets, _ = plain_tokens(model)
    logps = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    loss = (-logps.exp().detach() * logps).mean()
    loss.backward()
    assert logged(trainer, "loss")[0] == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients(keep, model)


@pytest.mark.parametrize("split", SPLITS, ids=["1x8", "4x2", "2x4 padding-free"])
def test_label_smoothing(split):
    trainer, keep = build(label_smoothing_factor=0.2, **split)
    trainer.train()
    model = model64()
    logits, targets, _ = plain_tokens(model)
    loss = F.cross_entropy(logits, targets, label_smoothing=0.2)
    loss.backward()
    assert logged(trainer, "loss")[0] == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients(keep, model, tolerance=1e-6)  # transformers' smoother sums in float32
    assert logged(trainer, "mean_token_accuracy") == logged(trained_plainly(), "mean_token_accuracy")


def trained_plainly(**settings):
    trainer, _ = build(**settings)
    trainer.train()
    return trainer


def users_nll(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("split", SPLITS, ids=["1x8", "4x2", "2x4 padding-free"])
def test_the_users_own_loss_is_given_what_makes_it_the_default(split):
    trainer, keep = build(compute_loss_func=users_nll, eval_dataset=Dataset.from_list(ROWS), **split)
    trainer.train()
    expected, gradients = build(eval_dataset=Dataset.from_list(ROWS))
    expected.train()
    for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        assert logged(trainer, name) == pytest.approx(logged(expected, name), rel=1e-6), name
    for name, gradient in gradients.steps[0].items():
        torch.testing.assert_close(keep.steps[0][name], gradient, rtol=1e-9, atol=1e-12)
    own, default = trainer.evaluate(), expected.evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert own[name] == pytest.approx(default[name], rel=1e-9), name


@pytest.mark.parametrize("own", [{}, {"compute_loss_func": users_nll}, {"label_smoothing_factor": 0.1}])
def test_neftune_reaches_every_way_to_the_loss(own):
    """Whether it comes from hidden states or from the model's logits; and no evaluation."""
    trainer, _ = build(eval_dataset=Dataset.from_list(ROWS), neftune_noise_alpha=50.0, **own)
    clean = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == clean
    trainer.train()
    assert abs(logged(trainer, "loss")[0] - clean) > 0.01


# ---- metrics


def test_metrics_of_a_step():
    trainer = trained_plainly()
    logits, targets, everything = plain_tokens(model64())
    expected = {
        "loss": F.cross_entropy(logits, targets).item(),
        "mean_token_accuracy": (logits.argmax(-1) == targets).double().mean().item(),
        "entropy": torch.distributions.Categorical(logits=everything).entropy().mean().item(),
        "num_tokens": sum(len(row["input_ids"]) for row in ROWS),
    }
    for name, value in expected.items():
        assert logged(trainer, name) == [pytest.approx(value, rel=1e-6)], name
    assert "aux_loss" not in trainer.state.log_history[0]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"logging_steps": 2}, [2, 4]),
        ({"logging_steps": 2, "logging_first_step": True}, [1, 2, 4]),
        ({"logging_steps": 0.5}, [2, 4]),
        ({"logging_strategy": "no"}, [4]),  # for the summary
    ],
)  # fmt: skip
def test_entropy_is_computed_where_it_is_logged_and_nowhere_else(settings, steps, monkeypatch):
    trainer, _ = build(max_steps=4, **settings)
    computed = []
    score = trainer.scorer.score

    def spy(model, batch, options):
        if options.entropy != "none":
            computed.append(trainer.state.global_step + 1)
        return score(model, batch, options)

    monkeypatch.setattr(trainer.scorer, "score", spy)
    trainer.train()
    assert computed == steps
    assert len(logged(trainer, "entropy")) == len(steps)


def mixture(**overrides):
    return tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5, **overrides)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_router_loss_of_a_mixture_of_experts(smoothing):
    data = Dataset.from_list(ROWS)
    trainer, _ = build(mixture(), eval_dataset=data, label_smoothing_factor=smoothing)
    evaluated = trainer.evaluate()
    trainer.train()
    batch = trainer.scorer.padded_inputs(trainer.data_collator(ROWS))
    outputs = mixture()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing) + 0.5 * outputs.aux_loss
    assert logged(trainer, "aux_loss") == [pytest.approx(outputs.aux_loss.item(), rel=1e-5)]
    assert logged(trainer, "loss") == [pytest.approx(loss.item(), rel=1e-5)]
    assert evaluated["eval_aux_loss"] == pytest.approx(outputs.aux_loss.item(), rel=1e-5)
    assert evaluated["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


# ---- evaluation


def keep_predictions(logits, labels):
    return logits.argmax(-1)


@pytest.mark.parametrize("layout", [{}, {"padding_free": True}, {"eval_packing": True, "max_length": 24}])
def test_compute_metrics_sees_aligned_rows(layout):
    seen = {}

    def accuracy(prediction):
        seen.update(shapes=(prediction.predictions.shape, prediction.label_ids.shape))
        predicted, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
        trained = labels != -100
        return {"accuracy": float((predicted == labels)[trained].mean()), "count": int(trained.sum())}

    trainer, _ = build(
        eval_dataset=Dataset.from_list(ROWS), compute_metrics=accuracy, per_device_eval_batch_size=3,
        preprocess_logits_for_metrics=keep_predictions, **layout,
    )  # fmt: skip
    found = trainer.evaluate()
    plain = build(eval_dataset=Dataset.from_list(ROWS))[0].evaluate()
    assert seen["shapes"][0] == seen["shapes"][1]
    assert seen["shapes"][0][0] == 8
    assert found["eval_count"] == TRAINED
    assert found["eval_accuracy"] == pytest.approx(found["eval_mean_token_accuracy"], rel=1e-12)
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert found[name] == pytest.approx(plain[name], rel=1e-9), name


class OwnLogits(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss, outputs.logits = outputs.logits.mean(), outputs.logits * 2
        return (loss, outputs) if return_outputs else loss


def test_an_own_loss_beside_an_outcome_that_cannot_see_the_step_is_refused(monkeypatch):
    kind = type("Own", (SFTTrainer,), {"outcome": lambda self, model, batch: SFTTrainer.outcome(self, model, batch)})
    monkeypatch.setitem(globals(), "SFTTrainer", kind)
    with pytest.raises(ValueError, match="compute_loss_func and an outcome"):
        build(compute_loss_func=users_nll)


def test_logits_of_an_overridden_loss_are_kept(monkeypatch):
    expected = build()[0].predict(Dataset.from_list(ROWS[:3]))
    monkeypatch.setitem(globals(), "SFTTrainer", OwnLogits)
    trainer, calls = build(model64())[0], []
    trainer.model.register_forward_hook(lambda *_: calls.append(1))
    found = trainer.predict(Dataset.from_list(ROWS[:3]))
    assert len(calls) == 1 and (found.label_ids == expected.label_ids).all()
    trained = found.label_ids != -100
    assert found.predictions[trained] == pytest.approx(2 * expected.predictions[trained], abs=1e-9)


def test_predict_gives_logits_and_labels():
    trainer, _ = build()
    result = trainer.predict(Dataset.from_list(ROWS[:3]))
    model = model64()
    for row, logits, labels in zip(ROWS[:3], result.predictions, result.label_ids, strict=True):
        ids = torch.tensor([row["input_ids"]])
        expected = model(input_ids=ids).logits[0].detach().numpy()
        assert abs(logits[: ids.shape[1]] - expected).max() < 1e-9
        assert (labels != -100).sum() == sum(row["completion_mask"])
    assert {"test_loss", "test_entropy", "test_mean_token_accuracy"} <= set(result.metrics)


def test_raw_rows_are_prepared_when_they_are_evaluated():
    words = Dataset.from_list([{"text": "w3 w4 w5 w6"}, {"text": "w7 w8"}])
    trainer, _ = build(eval_dataset=words)
    stored, given = trainer.evaluate(), trainer.evaluate(words)
    assert given["eval_loss"] == stored["eval_loss"]
    assert trainer.evaluate({"a": words})["eval_a_loss"] == stored["eval_loss"]
    assert trainer.predict(words).metrics["test_loss"] == pytest.approx(stored["eval_loss"], rel=1e-9)


# ---- precision and memory


def test_bfloat16_on_a_cpu_runs_under_autocast():
    dtypes = set()
    model = tiny_model("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    trainer, _ = build(model=model, bf16=True, eval_dataset=Dataset.from_list(ROWS))
    evaluated = trainer.evaluate()
    trainer.train()
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert logged(trainer, "loss") == [pytest.approx(logged(trained_plainly(), "loss")[0], rel=2e-2)]
    assert evaluated["eval_loss"] == pytest.approx(logged(trainer, "loss")[0], rel=1e-6)


class WithoutCount(SFTTrainer):
    """Overrides in the forms of 0.4-0.11, before transformers added arguments; the first hands nothing on."""

    def compute_loss(self, model, inputs, return_outputs=False):
        return super().compute_loss(model, inputs, return_outputs)

    def log(self, logs):
        super().log({**logs, "own": 1.0})


class OwnMean(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 3.0 * next(model.parameters()).double().mean()


@pytest.mark.parametrize("batch_size", [8, 2])
def test_overrides_without_the_count_train_on_the_mean_of_the_step(batch_size, monkeypatch):
    cut = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 8 // batch_size}
    reference, expected = build()
    reference.train()
    monkeypatch.setitem(globals(), "SFTTrainer", WithoutCount)
    trainer, keep = build(**cut)
    trainer.train()
    for name, gradient in expected.steps[0].items():
        torch.testing.assert_close(keep.steps[0][name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    assert logged(trainer, "loss") == pytest.approx(logged(reference, "loss"), rel=1e-6)
    assert logged(trainer, "own") == [1.0, 1.0]  # of the step and the summary


@pytest.mark.parametrize("batch_size", [8, 2])
def test_an_own_mean_is_divided_by_the_number_of_micro_batches(batch_size, monkeypatch):
    monkeypatch.setitem(globals(), "SFTTrainer", OwnMean)
    model = model64()
    trainer, keep = build(model, per_device_train_batch_size=batch_size, gradient_accumulation_steps=8 // batch_size)
    first = next(iter(dict(model.named_parameters())))
    trainer.train()
    gradient = keep.steps[0][first]
    torch.testing.assert_close(gradient, torch.full_like(gradient, 3.0 / gradient.numel()), rtol=1e-9, atol=0)
