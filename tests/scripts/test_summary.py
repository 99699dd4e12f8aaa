from types import SimpleNamespace

import pytest

from tests.tiny_tokenizers import tiny_tokenizer
from trl.reporting.usage import usage_of
from trl.scripts.messages import finish, usage


def finished_trainer(*, core=None, template=None, adapters=None, **parts):
    model = SimpleNamespace(peft_config=adapters or {})
    accelerator = SimpleNamespace(is_main_process=True, end_training=lambda: None, unwrap_model=lambda model: model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return SimpleNamespace(
        accelerator=accelerator, model=model, save_model=lambda output_dir: None,
        scorer=SimpleNamespace(core=core), processing_class=tokenizer, **parts,
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
    assert usage(finished_trainer(**made)) == [*load, '  print(model("Some text")[0]["generated_text"])']
    assert usage(finished_trainer(**made, template=chat), has_chats=False) == [
        *load,
        '  print(model("Some text")[0]["generated_text"])',
    ]
    made["core"] = LlamaForSequenceClassification()
    assert usage(finished_trainer(**made, template=chat))[1:] == ['  model = pipeline("text-classification", "out")']
    of_steps = usage_of("out", "LlamaForTokenClassification", chats=True)  # on the page of `trl report`
    assert of_steps[1:] == ['model = pipeline("token-classification", "out")']


@pytest.mark.parametrize(("best", "stopped"), [(False, False), (True, False), (False, True)])
def test_where_the_model_is_and_whether_the_run_is_over(capsys, tmp_path, best, stopped):
    args = SimpleNamespace(
        output_dir=str(tmp_path), push_to_hub=False, max_steps=3, save_strategy="no", load_best_model_at_end=best,
        metric_for_best_model="loss",
    )  # fmt: skip
    state = SimpleNamespace(
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
    why = "no checkpoint was written (--save_strategy no)"
    assert len(lines) == 2 and lines[1].startswith(
        f"It cannot be resumed: {why}" if stopped else f"This run cannot be resumed: {why}"
    )
