"""Model cards name the base, the data, the method, the versions, and read back as cards."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from transformers import LlamaConfig, TrainingArguments

from tests.tiny_tokenizers import tiny_tokenizer
from trl.reporting.model_card import card_of_trainer, generate_model_card

FIELDS = {
    "base_model": "owner/base", "model_name": "my-model", "hub_model_id": "me/my-model",
    "dataset_name": "owner/data", "tags": ["trl", "sft"], "wandb_url": "https://wandb.test/run",
    "trainer_name": "SFT", "trainer_citation": "@article{x, title = {{A {Title}}}}", "paper_title": "A paper",
    "paper_id": "2402.03300", "comet_url": None,
}  # fmt: skip


def test_everything_is_in_the_card(tmp_path):
    generate_model_card(**FIELDS).save(tmp_path / "README.md")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "owner/base"
    assert card.data.datasets == ["owner/data"]
    assert card.data.model_name == "my-model"
    assert card.data.tags == ["generated_from_trainer", "trl", "sft"]
    for text in (
        "A fine-tune of [owner/base](https://huggingface.co/owner/base) on [owner/data]",
        'model="me/my-model"',
        "Method: SFT, from [A paper](https://huggingface.co/papers/2402.03300).",
        "https://wandb.test/run",
        "@article{x, title = {{A {Title}}}}",
        "- transformers: ",
        "@misc{trl,",
    ):
        assert text in card.text
    assert "Comet" not in card.text
    assert "VERSION" not in card.text and "HOWPUBLISHED" not in card.text
    assert "pypi.org" not in card.text  # the project of that name there is another one
    assert "Run this in the folder" not in card.text


def test_the_settings_of_a_method_its_data_adapter_and_figures_are_in_the_card(tmp_path):
    pytest.importorskip("peft")
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model

    from trl import GRPOConfig

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    trainer = SimpleNamespace(
        args=GRPOConfig(str(tmp_path), beta=0.0, num_generations=4, use_cpu=True),
        state=SimpleNamespace(
            global_step=2,
            log_history=[
                {"eval_loss": 3.0, "eval_runtime": 1.0},
                {"loss": 1.0},
                {"eval_loss": 2.0, "eval_rewards/mean": 0.25},
            ],
        ),
        model=get_peft_model(transformers.LlamaForCausalLM(config), LoraConfig(r=3, lora_alpha=5)),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 7),
        eval_dataset=None,
        _name="GRPO",
        _paper=None,
        _tag_names=[],
    )
    text = card_of_trainer(trainer).text
    for row in (
        "| beta | 0.0 |", "| num_generations | 4 |", "| loss_type | dapo |", "| LORA r | 3 |", "| LORA lora_alpha | 5 |",
        "| rows of train_dataset | 7 |", "| eval_loss | 2 |", "| eval_rewards/mean | 0.25 |",
    ):  # fmt: skip
        assert row in text
    assert "eval_runtime" not in text and "rows of eval_dataset" not in text


def test_the_card_of_a_trainer(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(url="https://wandb.test/2")))
    args = SimpleNamespace(
        output_dir=str(tmp_path / "run7"),
        hub_model_id=None,
        learning_rate=2e-5,
        lr_scheduler_type="linear",
        max_length=None,
        seed=3,
        bf16=False,
        fp16=False,
        train_batch_size=4,
        gradient_accumulation_steps=2,
        world_size=3,
        max_steps=-1,
    )
    trainer = SimpleNamespace(
        args=args,
        state=SimpleNamespace(global_step=9, log_history=[{"loss": 2.0}, {"loss": 1.23456}, {"train_loss": 1.5}]),
        model=SimpleNamespace(config=SimpleNamespace(_name_or_path="")),
        _name="SFT",
        _paper=None,
        _tag_names=["trl", "sft"],
    )
    card = card_of_trainer(trainer, tags=["sft", "mine"])
    assert card.data.tags == ["generated_from_trainer", "trl", "sft", "mine"]
    for text in (
        "# run7",
        "| rows per optimiser step | 24 |",
        "| optimiser steps | 9 |",
        "| last training loss | 1.235 |",
        "| seed | 3 |",
        "https://wandb.test/2",
        "Method: SFT.",
    ):
        assert text in card.text
    assert "bf16" not in card.text


def example_of(text):
    return text.split("```python\n")[1].split("\n```")[0]


@pytest.mark.parametrize("chats", [True, False])
@pytest.mark.parametrize("kind", ["CausalLM", "SequenceClassification", "TokenClassification"])
def test_the_example_of_a_card_runs_on_the_model_it_stands_beside(kind, chats, tmp_path, monkeypatch, capsys):
    """What a reward model is asked is a score, and a model without a chat template is not told a chat."""
    tokenizer = tiny_tokenizer("qwen3_like" if chats else "none")
    options = {} if kind == "CausalLM" else {"num_labels": 1 if kind == "SequenceClassification" else 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **options,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"LlamaFor{kind}")(config)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = SimpleNamespace(
        args=args,
        state=SimpleNamespace(global_step=1, log_history=[]),
        model=model,
        processing_class=tokenizer,
        _name="X",
        _paper=None,
        _tag_names=[],
    )
    card = card_of_trainer(trainer).text
    assert "Run this in the folder of this card:" in card and str(tmp_path) not in example_of(card)
    monkeypatch.chdir(tmp_path)
    exec(example_of(card), {})
    printed = capsys.readouterr().out.strip()
    if kind == "CausalLM":
        assert printed  # an answer
    elif kind == "TokenClassification":
        assert 0 < float(printed) < 1
    else:
        text = "What is 2 + 2? It is 4." + tokenizer.eos_token
        messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
        if chats:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert float(printed) == pytest.approx(model.eval()(ids).logits.item(), abs=1e-6)


def saved_card(folder):
    return ModelCard.load(folder / "README.md")


@pytest.mark.parametrize("adapter", [False, True])
def test_save_model_writes_the_card_into_its_folder(adapter, tmp_path):
    """With the steps that were trained; an adapter's names PEFT; one that was written by hand stays."""
    from datasets import Dataset

    from tests.tiny import tiny_model
    from trl import SFTConfig, SFTTrainer

    peft_config = None
    if adapter:
        peft = pytest.importorskip("peft")
        peft_config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    args = SFTConfig(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, use_cpu=True, save_strategy="no", report_to="none",
    )  # fmt: skip
    trainer = SFTTrainer(
        tiny_model("llama"),
        args,
        train_dataset=Dataset.from_dict({"input_ids": [[1, 2, 3]] * 8}),
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("# By hand")
    for place in ("whole", "mine"):
        trainer.save_model(str(tmp_path / place))
    trainer.save_model(str(tmp_path / "whole"))  # once more, over its own
    card = saved_card(tmp_path / "whole")
    assert card.data.library_name == ("peft" if adapter else "transformers")
    assert "| optimiser steps | 2 |" in card.text and "| epochs | 0.5 |" in card.text
    assert "num_train_epochs" not in card.text and "generated_from_trainer" in card.data.tags
    text = (tmp_path / "mine" / "README.md").read_text()
    assert text.endswith("# By hand") if not adapter else "By hand" in text
