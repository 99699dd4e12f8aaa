"""Subclasses that override a method of 0.4-0.26: its loss is trained with, however the step is cut, or it is refused."""

import tempfile
from types import MethodType

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid, softplus

from tests.tiny import tiny_model
from tests.trainer import dpo_runs, grpo_runs, kto_runs, reward_runs
from tests.trainer.kto_runs import SPLITS
from tests.trainer.one_step import assert_same_gradient, plain_gradient, step, trainer_of
from tests.trainer.resume_worker import tokenizer
from trl import (
    BCOConfig,
    BCOTrainer,
    CPOConfig,
    CPOTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
)

CUT = SPLITS["2x4"]


def make(trainer_class, config_class, rows, **settings):
    """A trainer of a subclass on the eight rows of its method."""
    if "model" not in settings:
        settings["model"], reference = dpo_runs.policy_and_reference()
        if config_class not in (CPOConfig, ORPOConfig):
            settings.setdefault("ref_model", reference)
    return trainer_of(trainer_class, config_class, None, settings, train_dataset=Dataset.from_list(rows))


def dpo(trainer_class=DPOTrainer, **settings):
    return make(trainer_class, DPOConfig, dpo_runs.pairs(), **{"beta": 0.3, **settings})


def cpo(trainer_class=CPOTrainer, **settings):
    return make(trainer_class, CPOConfig, dpo_runs.pairs(), **{"beta": 0.3, "cpo_alpha": 0.5, **settings})


def orpo(trainer_class=ORPOTrainer, **settings):
    return make(trainer_class, ORPOConfig, dpo_runs.pairs(), **{"beta": 0.5, **settings})


def kto(trainer_class=KTOTrainer, **settings):
    return make(trainer_class, KTOConfig, kto_runs.rows(), **{"beta": 0.3, **settings})


def bco(trainer_class=BCOTrainer, **settings):
    return make(trainer_class, BCOConfig, kto_runs.rows(), **{"beta": 0.3, **settings})


def reward(trainer_class=RewardTrainer, **settings):
    settings = {
        "train_dataset": Dataset.from_list(reward_runs.rows()),
        "model": reward_runs.reward_model(),
        **settings,
    }
    return trainer_of(trainer_class, RewardConfig, None, settings)


def doubled(base, name):
    """A subclass whose method gives twice the loss."""

    def method(self, *args, **kwargs):
        found = getattr(base, name)(self, *args, **kwargs)
        return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found

    return type("Twice", (base,), {name: method})


def times(gradients, factor):
    return {name: factor * gradient for name, gradient in gradients.items()}


def forward_of_0_26(trainer, model, batch):
    """Log-probs of chosen and rejected as programs of 0.12-0.26 find them: a padded batch through the model itself."""
    found = trainer.concatenated_inputs(batch, padding_value=0)
    prompts, completions = found["prompt_input_ids"], found["completion_input_ids"]
    ids = torch.cat([prompts, completions], dim=1)
    mask = torch.cat([found["prompt_attention_mask"], found["completion_attention_mask"]], dim=1)
    loss_mask = torch.cat([torch.zeros_like(prompts), found["completion_attention_mask"]], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    totals = (logps * loss_mask[:, 1:]).sum(dim=1)
    half = batch["prompt_input_ids"].shape[0]
    return totals[:half], totals[half:], logits


class NoReference(DPOTrainer):
    def compute_ref_log_probs(self, batch):
        zeros = torch.zeros(batch["prompt_input_ids"].shape[0], dtype=torch.float64)
        return zeros, zeros


class OlderNoReference(DPOTrainer):
    compute_reference_log_probs = NoReference.compute_ref_log_probs


class WholeBatch(DPOTrainer):
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        chosen, rejected, _ = forward_of_0_26(self, model, batch)
        prefix = "eval_" if train_eval == "eval" else ""
        return softplus(rejected - chosen).mean(), {f"{prefix}mine": (chosen - rejected).mean().item()}


@pytest.fixture(scope="module")
def plain():
    return step(dpo())


DOUBLED = {
    "dpo": (dpo, DPOTrainer, "dpo_loss", ("rewards/margins",)),
    "kto": (kto, KTOTrainer, "kto_loss", ("kl", "rewards/chosen", "logps/rejected")),
    "bco": (bco, BCOTrainer, "bco_loss", ("delta",)),
    "reward": (reward, RewardTrainer, "compute_loss", ("margin",)),
}
SHAPES = {"whole": {}, "cut": CUT}


@pytest.mark.parametrize(
    ("method", "shape"), [(m, shape) for m in DOUBLED for shape in SHAPES if (m, shape) != ("kto", "cut")]
)
def test_a_doubled_loss(method, shape):
    """KTO's estimate is that of a micro-batch here, so that its steps depend on how they are cut."""
    make_one, base, name, metrics = DOUBLED[method]
    (gradients, log), expected = step(make_one(doubled(base, name), **SHAPES[shape])), step(make_one())
    assert_same_gradient(gradients, times(expected[0], 2))
    assert log["loss"] == pytest.approx(2 * expected[1]["loss"], rel=1e-6)
    for metric in metrics:
        assert log[metric] == pytest.approx(expected[1][metric], rel=1e-6), metric


def test_dpo_loss_of_a_mixture():
    settings = {
        "loss_type": ["sigmoid", "hinge"],
        "loss_weights": [0.5, 2.0],
        "rpo_alpha": 0.4,
        "use_weighting": True,
    }

    class Same(DPOTrainer):
        def dpo_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, loss_type, model_output):
            assert "nll_loss" in model_output
            logps = chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps
            return super().dpo_loss(*logps, loss_type, model_output)

    found, expected = step(dpo(Same, **settings, **CUT)), step(dpo(**settings))
    assert_same_gradient(found[0], expected[0])
    assert found[1]["nll_loss"] == pytest.approx(expected[1]["nll_loss"], rel=1e-9)
    assert found[1]["rewards/chosen"] == pytest.approx(expected[1]["rewards/chosen"], rel=1e-9)


def test_a_method_replaced_on_an_instance(plain):
    trainer = dpo()
    trainer.dpo_loss = MethodType(doubled(DPOTrainer, "dpo_loss").dpo_loss, trainer)
    assert_same_gradient(step(trainer)[0], times(plain[0], 2))


@pytest.mark.parametrize("kind", [NoReference, OlderNoReference])
def test_compute_ref_log_probs(kind):
    model = dpo_runs.policy_and_reference()[0]
    expected = step(dpo(model=model, reference_free=True))
    assert_same_gradient(step(dpo(kind, **CUT))[0], expected[0])


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_get_batch_loss_metrics(cut):
    trainer = dpo(WholeBatch, eval_dataset=Dataset.from_list(dpo_runs.pairs()[:3]), per_device_eval_batch_size=2, **cut)
    gradients, log = step(trainer)
    model = dpo_runs.policy_and_reference()[0]
    expected = step(dpo(model=model, reference_free=True, beta=1.0))
    assert_same_gradient(gradients, expected[0])
    margins = expected[1]["logps/chosen"] - expected[1]["logps/rejected"]
    assert log["mine"] == pytest.approx(margins, rel=1e-6)
    metrics = trainer.evaluate()
    batch = trainer.data_collator(dpo_runs.pairs()[:3])
    chosen, rejected, _ = forward_of_0_26(trainer, trainer.model, trainer.handed_out(batch, batch))
    assert metrics["eval_loss"] == pytest.approx(softplus(rejected - chosen).mean().item(), rel=1e-6)
    assert metrics["eval_mine"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-6)
    assert trainer.predict(Dataset.from_list(dpo_runs.pairs()[:3])).predictions.shape == (3, 2)


def test_store_metrics():
    class Stores(DPOTrainer):
        def store_metrics(self, metrics, train_eval="train"):
            self.stored = [*getattr(self, "stored", []), (train_eval, dict(metrics))]

    trainer = dpo(Stores)
    gradients, log = step(trainer)
    assert_same_gradient(gradients, step(dpo())[0])
    ((mode, metrics),) = trainer.stored
    assert mode == "train" and "rewards/margins" in metrics and "rewards/margins" not in log


def two_arguments(base):
    """A subclass with an `outcome` that takes a model and a batch alone, and doubles the loss."""

    def outcome(self, model, batch):
        found = base.outcome(self, model, batch)
        local = None if found.local is None else 2 * found.local
        return found._replace(terms=[each._replace(values=2 * each.values) for each in found.terms], local=local)

    return type("Own", (base,), {"outcome": outcome})


def test_outcome_with_two_arguments(plain):
    trainer = dpo(two_arguments(DPOTrainer), **CUT)
    assert_same_gradient(step(trainer)[0], times(plain[0], 2))


def test_outcome_with_two_arguments_of_a_mixin(plain):
    mixin = type("Mixin", (), {"outcome": vars(two_arguments(DPOTrainer))["outcome"].__wrapped__})
    trainer = dpo(type("Own", (mixin, DPOTrainer), {}), **CUT)
    assert_same_gradient(step(trainer)[0], times(plain[0], 2))
    further = type("Further", (type(trainer),), {})
    assert further.outcome is type(trainer).outcome
    trainer.predict(Dataset.from_list(dpo_runs.pairs()[:2]))


def test_outcome_of_groups_replaces_the_scoring(monkeypatch):
    found = []
    for kind in (GRPOTrainer, two_arguments(GRPOTrainer)):
        if found:
            kind._get_per_token_logps = None
        monkeypatch.setitem(grpo_runs.TRAINERS, "grpo", (grpo_runs.TRAINERS["grpo"][0], kind))
        trainer, keep = grpo_runs.make("grpo", max_steps=1, beta=0.0)
        trainer.train()
        found.append(keep.steps[0])
    assert_same_gradient(found[1], times(found[0], 2))


@pytest.mark.parametrize("whole", [False, True])
def test_compute_loss(plain, whole):
    """One of its own is the mean over its micro-batch; ours is a share of the step, also where the count is not handed on."""

    class Own(DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if whole:
                chosen, rejected, _ = forward_of_0_26(self, model, inputs)
                loss = softplus(rejected - chosen).mean()
                return (loss, {"mine": 1.0}) if return_outputs else loss
            return 2 * super().compute_loss(model, inputs)

    trainer = dpo(Own, **CUT)
    model = dpo_runs.policy_and_reference()[0]
    expected = step(dpo(model=model, reference_free=True, beta=1.0))[0] if whole else times(plain[0], 2)
    assert_same_gradient(step(trainer)[0], expected)
    assert trainer.evaluate(Dataset.from_list(dpo_runs.pairs()[:2]))["eval_loss"] > 0


# ---- CPO and ORPO


def whole_sequences(trainer, model, batch, average):
    found = trainer.concatenated_inputs(batch, padding_value=0)
    half = batch["chosen_labels"].shape[0]
    ids, mask = found["concatenated_input_ids"], found["concatenated_attention_mask"]
    logits = model(ids, attention_mask=mask).logits
    logps = CPOTrainer.get_batch_logps(logits, found["concatenated_labels"], average_log_prob=average)
    return (
        logps[:half],
        logps[half:],
        logits[:half],
        logits[half:],
        ids[:half],
        mask[:half],
        found["concatenated_labels"][:half],
    )


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_cpo_loss(cut):
    class Hinge(CPOTrainer):
        def cpo_loss(self, policy_chosen_logps, policy_rejected_logps):
            losses = torch.relu(1 - 0.3 * (policy_chosen_logps - policy_rejected_logps))
            return losses, 5 * policy_chosen_logps.detach(), 5 * policy_rejected_logps.detach()

    found, expected = step(cpo(Hinge, **cut)), step(cpo(loss_type="hinge"))
    assert_same_gradient(found[0], expected[0])
    assert found[1]["rewards/chosen"] == pytest.approx(5 / 0.3 * expected[1]["rewards/chosen"], rel=1e-9)


@pytest.mark.parametrize("make_one", [cpo, orpo])
def test_get_batch_loss_metrics_without_a_reference(make_one):
    base = CPOTrainer if make_one is cpo else ORPOTrainer

    class Own(base):
        def get_batch_loss_metrics(self, model, batch, train_eval="train"):
            chosen, rejected, *_ = whole_sequences(self, model, batch, False)
            return -logsigmoid(chosen - rejected).mean(), {"mine": torch.tensor(2.0)}

    gradients, log = step(make_one(Own, **CUT))
    expected = step(cpo(beta=1.0, cpo_alpha=0.0))
    assert_same_gradient(gradients, expected[0])
    assert log["mine"] == 2.0


# ---- KTO and BCO


def forward_of_rows(model, batch, prefix=""):
    """Log-probs of each row's sequence as programs of 0.8-0.26 find them, and its logits."""
    ids, labels = batch[f"{prefix}completion_input_ids"], batch[f"{prefix}completion_labels"]
    logits = model(ids, attention_mask=batch[f"{prefix}completion_attention_mask"]).logits
    return KTOTrainer.get_batch_logps(logits, labels), logits


def assert_as_plain(trainer, expected, *names):
    gradients, log = step(trainer)
    assert_same_gradient(gradients, expected[0])
    for name in ("loss", *names):
        assert log[name] == pytest.approx(expected[1][name], rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_kto_loss_without_a_kl(cut):
    """The mean alone counts for each row; without a KL estimate a step does not depend on its cut."""

    class Mean(KTOTrainer):
        def kto_loss(self, *logps):
            assert logps[2] is logps[5] is None
            losses, *rest = super().kto_loss(*logps)
            return losses.mean(), *rest

    assert_as_plain(
        kto(Mean, loss_type="apo_zero_unpaired", **cut),
        step(kto(loss_type="apo_zero_unpaired")),
        "rewards/chosen",
    )


@pytest.mark.parametrize("make_one", [kto, bco])
def test_compute_reference_log_probs(make_one):
    base = KTOTrainer if make_one is kto else BCOTrainer

    class Zero(base):
        def compute_reference_log_probs(self, padded_batch):
            zeros = torch.zeros(len(padded_batch["completion_input_ids"]), dtype=torch.float64)
            return (zeros, zeros) if base is KTOTrainer else zeros

    trainer = make_one(Zero)
    gradients, log = step(trainer)
    assert log["rewards/chosen"] == pytest.approx(0.3 * log["logps/chosen"], rel=1e-6)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-6


def test_rewards_of_a_cut_step_count_once_whatever_bco_loss_hands_on():
    class Same(BCOTrainer):
        def bco_loss(self, pc, pr, rc, rr, *others):
            return super().bco_loss(pc, pr, rc, rr)

    trainer = bco(Same, **CUT)
    assert_as_plain(trainer, step(bco()), "delta")
    assert trainer.method.state()["rewards"]["count"] == len(kto_runs.rows())


@pytest.mark.parametrize("make_one", [kto, bco])
def test_get_batch_loss_metrics_of_rows(make_one):
    base = KTOTrainer if make_one is kto else BCOTrainer

    class Own(base):
        def get_batch_loss_metrics(self, model, batch, **given):
            assert given == ({"train_eval": "train"} if base is KTOTrainer else {"do_train": True})
            logps, _ = forward_of_rows(model, batch)
            signs = torch.tensor([1 if label is True else -1 for label in batch["label"]])
            return -logsigmoid(signs * logps / 10).mean(), {"mine": 3.0}

    gradients, log = step(make_one(Own, **CUT))
    model = dpo_runs.policy_and_reference()[0]
    logps = torch.stack(
        [kto_runs.logps(model, row["prompt_input_ids"], row["completion_input_ids"]) for row in kto_runs.rows()]
    )
    signs = torch.tensor([1 if row["label"] else -1 for row in kto_runs.rows()])
    assert_same_gradient(gradients, plain_gradient(model, -logsigmoid(signs * logps / 10).mean()))
    assert log["mine"] == 3.0


# ---- reward models


@pytest.mark.parametrize("columns", ["0.26", "0.11"])
def test_compute_loss_of_rewards(columns):
    class Own(RewardTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if columns == "0.26":
                chosen, rejected = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.chunk(2)
            else:
                chosen, rejected = (
                    model(inputs[f"input_ids_{side}"], attention_mask=inputs[f"attention_mask_{side}"]).logits
                    for side in ("chosen", "rejected")
                )
            return -3 * logsigmoid(chosen[:, 0] - rejected[:, 0] - inputs["margin"]).mean()

    assert_same_gradient(step(reward(Own, **CUT))[0], times(step(reward_runs.make())[0], 3))


# ---- what is refused


@pytest.mark.parametrize(
    ("make_one", "base", "name", "advice"),
    [
        (dpo, DPOTrainer, "concatenated_forward", "Override get_batch_loss_metrics"),
        (dpo, DPOTrainer, "concatenated_inputs", "Override get_batch_loss_metrics"),
        (orpo, ORPOTrainer, "concatenated_forward", "Override get_batch_loss_metrics"),
        (kto, KTOTrainer, "null_ref_context", "Override get_batch_loss_metrics"),
        (kto, KTOTrainer, "forward", "Override get_batch_loss_metrics"),
        (cpo, CPOTrainer, "tokenize_row", "Tokenise the rows before"),
        (bco, BCOTrainer, "get_batch_logps", "Override"),
    ],
)
def test_what_training_does_not_call_is_refused(make_one, base, name, advice):
    kind = type("Mine", (base,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(TypeError, match=f"Mine overrides {name}, which training does not call. {advice}"):
        make_one(kind)
    kind.get_batch_loss_metrics = lambda self, model, batch: (model, {})  # it may call the other
    if name != "tokenize_row":
        make_one(kind)


def test_an_overridden_reference_is_not_precomputed():
    with pytest.raises(ValueError, match=r"^precompute_ref_log_probs=True .* NoReference"):
        dpo(NoReference, precompute_ref_log_probs=True)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("_compute_loss", "Override objective"),
        ("compute_liger_loss", "Override objective"),
        ("_generate_and_score_completions", "Give rollout_func="),
        ("_calculate_rewards", "Give reward_funcs="),
        ("_get_per_token_logps_and_entropies", "Override score_rollout"),
    ],
)
def test_what_groups_do_not_call_is_refused(name, advice):
    kind = type("Mine", (GRPOTrainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(TypeError, match=f"Mine overrides {name}, which training does not call. {advice}"):
        kind(tiny_model("gpt2"), grpo_runs.even_tokens, GRPOConfig(tempfile.mkdtemp(), **grpo_runs.SETTINGS),
             train_dataset=grpo_runs.prompts(), processing_class=tokenizer())  # fmt: skip


def test_get_high_entropy_mask():
    """An overridden one chooses the tokens: with none, nothing is learned from."""
    asked = []

    def none(self, entropies, mask, threshold):
        asked.append((entropies.shape == mask.shape, threshold))
        return torch.zeros_like(mask)

    trainer, keep = grpo_runs.make("grpo", top_entropy_quantile=0.4, max_steps=1, beta=0.0)
    trainer.get_high_entropy_mask = MethodType(none, trainer)
    trainer.train()
    assert asked == [(True, 0.6)]
    assert all(gradient.abs().max() == 0 for gradient in keep.steps[0].values())
