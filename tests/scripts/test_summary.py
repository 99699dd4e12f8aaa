from types import SimpleNamespace

import pytest

from tests.tiny_tokenizers import tiny_tokenizer
from trl.reporting.run_lines import RunLines
from trl.scripts.report import finish, last_metrics, usage

HISTORY = [
    {"eval_loss": 3.0, "step": 0},
    {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-5, "epoch": 0.5, "entropy": 0.75, "step": 1},
    {"eval_a_loss": 1.25, "eval_a_runtime": 0.1, "eval_num_tokens": 5, "epoch": 0.5, "step": 1},
    {"eval_b_loss": 1.5, "eval_b_samples_per_second": 9.0, "epoch": 0.5, "step": 1},
    {"loss": 1.25, "mean_token_accuracy": 0.5, "num_tokens": 12345, "train_runtime": 2.0, "step": 2},
    {"train_runtime": 3.0, "train_loss": 1.625, "total_flos": 1.0, "train_steps_per_second": 3.0, "step": 3},
]  # fmt: skip


def test_the_last_log_of_each_kind_with_its_step_and_nothing_of_earlier_ones():
    assert last_metrics(HISTORY) == [
        "Last training log (step 2): loss 1.25, mean_token_accuracy 0.5",
        "Last evaluation (step 1): eval_a_loss 1.25, eval_b_loss 1.5",
        "Whole run (step 3): train_loss 1.625",
    ]
    assert last_metrics(HISTORY[:2]) == [
        "Last training log (step 1): loss 2, entropy 0.75",
        "Last evaluation (step 0): eval_loss 3",
    ]
    assert last_metrics([]) == []


def finished_trainer(*, core=None, template=None, adapters=None, callbacks=(), **parts):
    model = SimpleNamespace(peft_config=adapters or {})
    accelerator = SimpleNamespace(is_main_process=True, end_training=lambda: None, unwrap_model=lambda model: model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return SimpleNamespace(
        accelerator=accelerator, model=model, save_model=lambda output_dir: None,
        scorer=SimpleNamespace(core=core), callback_handler=SimpleNamespace(callbacks=callbacks),
        processing_class=tokenizer, **parts,
    )  # fmt: skip


def test_a_model_is_shown_in_use():
    class LlamaForCausalLM:
        pass

    class LlamaForSequenceClassification:
        pass

    args = SimpleNamespace(output_dir="out")
    adapters = {"default": SimpleNamespace(base_model_name_or_path="base")}
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    made = {"core": LlamaForCausalLM(), "args": args}
    assert usage(finished_trainer(**made, template=chat)) == ["  trl chat out"]
    assert usage(finished_trainer(**made, template=chat, adapters=adapters)) == ["  trl chat out  # an adapter of base"]
    load = ["  from transformers import pipeline", '  model = pipeline("text-generation", "out")']
    assert usage(finished_trainer(**made)) == load
    made["core"] = LlamaForSequenceClassification()
    assert usage(finished_trainer(**made, template=chat))[1:] == ['  model = pipeline("text-classification", "out")']


@pytest.mark.parametrize(("best", "stopped"), [(False, False), (True, False), (False, True)])
def test_where_the_model_is_and_whether_the_run_is_over(capsys, tmp_path, best, stopped):
    args = SimpleNamespace(
        output_dir=str(tmp_path), push_to_hub=False, max_steps=3, save_strategy="no", load_best_model_at_end=best,
        metric_for_best_model="loss",
    )  # fmt: skip
    state = SimpleNamespace(
        log_history=HISTORY[-1:],
        global_step=3,
        max_steps=9 if stopped else 3,
        best_model_checkpoint="x",
        best_global_step=2,
        best_metric=1.5,
    )
    trainer = finished_trainer(args=args, state=state)
    finish(trainer, dataset_name=None, command="dpo", newest=None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Model saved in {tmp_path}" + (": that of step 2, the best (eval_loss 1.5)" if best else "")
    assert lines[1] == "Whole run (step 3): train_loss 1.625"
    why = "no checkpoint was written (--save_strategy no)"
    assert lines[2].startswith(f"It cannot be resumed: {why}" if stopped else f"This run cannot be resumed: {why}")


def test_numbers_of_the_table_are_not_repeated(capsys, tmp_path):
    args = SimpleNamespace(
        output_dir=str(tmp_path),
        push_to_hub=False,
        max_steps=3,
        save_strategy="no",
        load_best_model_at_end=False,
    )
    state = SimpleNamespace(log_history=HISTORY, global_step=3, max_steps=3)
    trainer = finished_trainer(args=args, state=state, callbacks=[RunLines()])
    finish(trainer, dataset_name=None, command="dpo", newest=None)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["Model", "This"]
