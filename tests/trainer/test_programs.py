"""What programs do with a trainer beside its constructor and `train`: attributes set later, overridden hooks, loaders of their own."""

from functools import partial
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import SequentialSampler

from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.sft_runs import config, make, model_for
from trl import DPOConfig, DPOTrainer, GRPOConfig, RLOOConfig, SFTTrainer
from trl.options.secrets import unwritten

ROWS = [{"text": text} for text in ("Look up.", "It is blue.", "And then?", "Next. " * 4)]
SHORT, LONG = [{"text": "Look up."}] * 3, [{"text": "Next. " * 9}] * 3


def test_save_state_writes_the_trainers_state(tmp_path: Any) -> None:
    trainer = make(ROWS, folder=tmp_path)
    trainer.train()
    trainer.save_state()
    assert (tmp_path / "trainer_state.json").is_file()


def test_a_run_whose_callbacks_were_taken_off_resumes_with_its_sums(tmp_path: Any) -> None:
    settings = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
    whole = make(ROWS, folder=tmp_path, **settings)
    whole.train()
    again = make(ROWS, folder=tmp_path, **settings)
    again.callback_handler.callbacks.clear()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.run_metrics.num_tokens() == whole.run_metrics.num_tokens() > 0


def test_an_outcome_without_predictions_is_refused_beside_compute_metrics(tmp_path: Any) -> None:
    class NoPredictions(SFTTrainer):
        def outcome(self, model: Any, batch: Any, **kwargs: Any) -> Any:
            return super().outcome(model, batch, **kwargs)._replace(predictions=None)

    rows, tokenizer = Dataset.from_list(ROWS), tiny_tokenizer()
    data: dict[str, Any] = {"eval_dataset": rows, "compute_metrics": lambda prediction: {"one": 1.0}}
    trainer = NoPredictions(model_for(tokenizer), config(tmp_path), processing_class=tokenizer, **data)
    with pytest.raises(ValueError, match="outcome gives no predictions"):
        trainer.evaluate()


def test_a_loss_function_may_be_set_after_the_constructor(tmp_path: Any) -> None:
    calls: list[int] = []

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        calls.append(1)
        return outputs.logits.square().sum() / num_items_in_batch

    trainer = make(ROWS, folder=tmp_path, max_steps=1)
    trainer.compute_loss_func = loss
    trainer.train()
    assert len(calls) == 1


def test_an_overridden_sampler_is_asked_with_group_by_length(tmp_path: Any) -> None:
    asked: list[int] = []

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            asked.append(1)
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    args = config(tmp_path, train_sampling_strategy="group_by_length", max_steps=1)
    tokenizer = tiny_tokenizer()
    trainer = InOrder(model_for(tokenizer), args, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer)
    trainer.train()
    assert asked


@pytest.mark.parametrize("workers", [{}, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}])
def test_each_stream_is_evaluated_on_its_own_rows(tmp_path: Any, workers: dict[str, Any]) -> None:
    sets = {
        "short": IterableDataset.from_generator(lambda: iter(SHORT)),
        "long": IterableDataset.from_generator(lambda: iter(LONG)),
    }
    trainer = make(ROWS, folder=tmp_path, trainer={"eval_dataset": sets}, **workers)
    together = trainer.evaluate()
    alone = [trainer.evaluate(Dataset.from_list(rows))["eval_loss"] for rows in (SHORT, LONG)]
    losses = [together["eval_short_loss"], together["eval_long_loss"]]
    assert losses == pytest.approx(alone, abs=1e-6) and abs(alone[0] - alone[1]) > 1e-3


@pytest.mark.parametrize("settings", [{"dataloader_drop_last": True}, {"train_sampling_strategy": "group_by_length"}])
def test_a_loader_built_as_transformers_does_reads_every_row(tmp_path: Any, settings: dict[str, Any]) -> None:
    class Own(SFTTrainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            rows = self.eval_dataset if eval_dataset is None else eval_dataset
            return self._get_dataloader(
                dataset=rows, description="Evaluation", batch_size=2, sampler_fn=self._get_eval_sampler
            )

    tokenizer = tiny_tokenizer()
    data: dict[str, Any] = {"train_dataset": Dataset.from_list(ROWS), "eval_dataset": Dataset.from_list(ROWS[:3])}
    trainer = Own(model_for(tokenizer), config(tmp_path, **settings), processing_class=tokenizer, **data)
    assert sum(len(batch["input_ids"]) for batch in trainer.get_eval_dataloader()) >= 1
    rows = [batch["labels"].ne(-100).sum().item() for batch in trainer.get_eval_dataloader()]
    plain = make(ROWS, folder=tmp_path / "plain", trainer={"eval_dataset": Dataset.from_list(ROWS[:3])})
    assert sum(rows) == sum(batch["labels"].ne(-100).sum().item() for batch in plain.get_eval_dataloader())


def test_a_subclass_may_set_args_and_attributes_before_the_constructor(tmp_path: Any) -> None:
    class Early(DPOTrainer):
        def __init__(self, model: Any, args: DPOConfig, **kwargs: Any) -> None:
            self.args = args
            self.max_length, self.beta = 77, 0.9
            super().__init__(model, args=args, **kwargs)

    pairs = Dataset.from_list([{"prompt": "Look", "chosen": " up.", "rejected": " down."}] * 2)
    tokenizer = tiny_tokenizer()
    args = DPOConfig(str(tmp_path), beta=0.3, report_to="none", use_cpu=True)
    trainer = Early(model_for(tokenizer), args, train_dataset=pairs, processing_class=tokenizer)
    assert (trainer.beta, args.beta) == (0.3, 0.3)  # the config's values count


def test_a_run_resumed_at_its_end_knows_its_epochs(tmp_path: Any) -> None:
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}
    whole = make(ROWS, folder=tmp_path, **settings)
    whole.train()
    again = make(ROWS, folder=tmp_path, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.num_train_epochs == whole.state.num_train_epochs == 2


def test_weights_of_a_bin_file_resume(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    from trl.models.loading import load_checkpoint_weights

    model, other = model_for(), model_for()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save({name: weight + 1 for name, weight in weights.items()}, tmp_path / "pytorch_model.bin")
    load_checkpoint_weights(other, tmp_path)
    name = "model.embed_tokens.weight"
    assert torch.equal(other.state_dict()[name], model.state_dict()[name] + 1)


class Centred:
    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        return rewards - rewards.mean()


def scaled(rewards: Tensor, group_size: int, factor: float = 1.0) -> Tensor:
    return rewards * factor


def test_an_estimator_is_saved_by_a_name_that_the_next_process_has() -> None:
    names = [
        unwritten(GRPOConfig("out", advantage_estimator=estimator, use_cpu=True)).advantage_estimator
        for estimator in (Centred(), partial(scaled, factor=2.0), scaled)
    ]
    assert names == ["Centred", "scaled", "scaled"]


def test_no_estimator_is_the_methods_own() -> None:
    assert RLOOConfig("out", advantage_estimator=None, use_cpu=True).advantage_estimator is None


def test_a_loss_whose_settings_are_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.objectives.group_policy import LOSS_TYPES, LossType

    def squared(ratios: Tensor, advantages: Tensor, logps: Tensor, options: Any) -> Tensor:
        return options.pull * ratios.square()

    monkeypatch.setitem(LOSS_TYPES, "squared", LossType(squared, "tokens", parameters=("pull",)))
    with pytest.raises(ValueError, match="lacks pull"):
        GRPOConfig("out", loss_type="squared", use_cpu=True)


def test_a_best_model_that_was_not_saved_is_told(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = {"eval_dataset": Dataset.from_list(ROWS)}
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
    }
    make(ROWS, folder=tmp_path, trainer=rows, save_steps=500, max_steps=2, **best).train()
    assert "was not saved" in caplog.text


def test_an_estimator_that_returns_nothing_is_told() -> None:
    from trl.objectives.group_advantages import estimated

    with pytest.raises(ValueError, match="must return 2 finite numbers"):
        estimated(lambda rewards, group_size: None, torch.tensor([1.0, 2.0]), 2)  # type: ignore[arg-type,return-value]


def trained(kind: type[SFTTrainer], folder: Any, *, resume: str | None = None, **settings: Any) -> SFTTrainer:
    """A trainer of a program's own class, after its run."""
    rows, tokenizer = Dataset.from_list(ROWS), tiny_tokenizer()
    trainer = kind(
        model_for(tokenizer), config(folder, **settings), train_dataset=rows, eval_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_random_plans_of_a_subclass_resume_to_the_same_numbers(tmp_path: Any) -> None:
    drawn: list[float] = []

    class Drawing(SFTTrainer):
        def prepare_step(self, batches: Any) -> None:
            super().prepare_step(batches)
            drawn.append(torch.rand(()).item())

    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    trained(Drawing, tmp_path, **settings)
    whole = [*drawn]
    drawn.clear()
    trained(Drawing, tmp_path, resume=str(tmp_path / "checkpoint-1"), **settings)
    assert len(whole) > 1
    assert drawn == whole[1:]


def test_a_programs_hook_loads_the_best_model(tmp_path: Any) -> None:
    loaded: list[str] = []

    class Loading(SFTTrainer):
        def _load_from_checkpoint(self, folder: str, *args: Any) -> None:
            loaded.append(folder)
            super()._load_from_checkpoint(folder, *args)

    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = trained(Loading, tmp_path, load_best_model_at_end=True, **steps)
    assert loaded == [trainer.state.best_model_checkpoint]


def test_a_program_counts_input_tokens_itself(tmp_path: Any) -> None:
    class Counting(SFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.state.num_input_tokens_seen += 100
            return super().training_step(*args, **kwargs)

    trainer = trained(Counting, tmp_path)
    assert trainer.state.num_input_tokens_seen == 100 * trainer.state.global_step > 0
