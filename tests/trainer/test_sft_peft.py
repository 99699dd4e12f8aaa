"""SFTTrainer and adapters: the base stays bit for bit, the adapter alone is trained, saved, loaded and trained on."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file

from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.one_step import KeepGradients
from tests.trainer.sft_runs import BLUE, USER, logged, make, model_for

ROWS = [{"messages": [USER, BLUE]}, {"messages": [USER, {"role": "assistant", "content": "Look up."}]}] * 2
SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}


def lora(**changes):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **changes})  # fmt: skip


def loaded_lora(model, seed=3):
    """The model with an adapter that does something already."""
    torch.manual_seed(seed)
    return get_peft_model(model, lora(init_lora_weights=False))


def test_the_base_stays_and_the_adapter_learns():
    model = model_for()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make(ROWS, model=model, trainer={"peft_config": lora()}, max_steps=4, learning_rate=0.05)
    trainer.train()
    after = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items() if "lora" not in name}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2  # A and B of two projections in two layers
    assert all("lora" in name for name in trained)
    losses = logged(trainer, "loss")
    assert losses[3] < losses[0] - 0.1


@pytest.mark.parametrize("settings", [{}, {"padding_free": True}, {"activation_offloading": True}])
def test_gradients_do_not_depend_on_checkpointing(settings):
    gradients = []
    for checkpointing in (False, True):
        keep = KeepGradients()
        trainer = make(
            ROWS, model=model_for().double(), gradient_checkpointing=checkpointing, max_steps=1,
            trainer={"peft_config": lora(), "callbacks": [keep]}, **settings,
        )  # fmt: skip
        trainer.train()
        gradients.append(keep.steps[0])
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) == 8
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).abs().max().item() <= 1e-12, name
        assert gradient.any() == ("lora_B" in name)  # B is zero, so A has no gradient yet


def test_only_the_adapter_is_saved_and_training_goes_on(tmp_path):
    """Two steps, saved, loaded and two more steps: the losses of four steps in one run."""
    whole = make(ROWS, model=loaded_lora(model_for()), max_steps=4, **SGD)
    whole.train()
    first = make(ROWS, model=loaded_lora(model_for()), max_steps=2, folder=tmp_path, **SGD)
    first.train()
    first.save_model()
    files = {path.name for path in tmp_path.iterdir()}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    } <= files
    assert "model.safetensors" not in files
    assert all("lora" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    again = PeftModel.from_pretrained(model_for(), tmp_path, is_trainable=True)
    second = make(ROWS, model=again, max_steps=2, **SGD)
    second.train()
    assert logged(first, "loss") + logged(second, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-6)


def test_tokens_of_a_template_are_trained_beside_the_adapter(tmp_path, caplog):
    larger = tiny_tokenizer()
    larger.add_special_tokens({"eos_token": "<|over|>"})
    larger.chat_template = larger.chat_template.replace("<|im_end|>", "<|over|>")
    larger.save_pretrained(tmp_path)
    for architecture, name in (("llama", "embed_tokens"), ("gpt2", "wte")):
        given = lora(target_modules="all-linear")
        trainer = make(
            ROWS, model=model_for(architecture=architecture), tokenizer=tiny_tokenizer("none"),
            chat_template_path=str(tmp_path), trainer={"peft_config": given},
        )  # fmt: skip
        assert given.trainable_token_indices is None  # the user's config is left alone
        assert trainer.model.peft_config["default"].trainable_token_indices == {name: [400]}
        before = trainer.model.get_input_embeddings()(torch.tensor([5, 400])).detach().clone()
        trainer.train()
        after = trainer.model.get_input_embeddings()(torch.tensor([5, 400])).detach()
        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[1], after[1])
    made = get_peft_model(model_for(), lora(target_modules="all-linear"))
    make(ROWS, model=made, tokenizer=tiny_tokenizer("none"), chat_template_path=str(tmp_path))
    assert "before the adapter is made, with trainable_token_indices" in caplog.text


def test_prompt_tuning_is_scored_from_its_own_logits(caplog):
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = make(
        ROWS,
        trainer={"peft_config": tuning, "eval_dataset": Dataset.from_list(ROWS)},
        learning_rate=0.3,
        max_steps=4,
    )
    assert "virtual tokens" in caplog.text
    batch = trainer.scorer.padded_inputs(trainer.data_collator(list(trainer.eval_dataset)))
    batch["labels"][:, 0] = -100  # which PEFT would predict from the virtual tokens
    with torch.no_grad():
        expected = trainer.model.eval()(**batch).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    trainer.train()
    assert logged(trainer, "loss")[3] < logged(trainer, "loss")[0]


def test_a_new_adapter_starts_at_the_loss_of_the_merged_one(caplog):
    adapted = loaded_lora(model_for())
    settings = {"max_steps": 1, "learning_rate": 0.0}
    own = make(ROWS, model=adapted, **settings)
    own.train()
    new = make(ROWS, model=adapted, trainer={"peft_config": lora(r=2)}, **settings)
    new.train()
    assert logged(new, "loss")[0] == pytest.approx(logged(own, "loss")[0], rel=1e-5)
    assert "merged into the base" in caplog.text


def test_four_bit_base(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model_for(hidden_size=64, intermediate_size=64, head_dim=16).save_pretrained(tmp_path)
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    weight = quantised.model.layers[0].self_attn.q_proj.weight
    before = weight.detach().clone()
    trainer = make(
        ROWS, model=quantised, folder=tmp_path / "run", gradient_checkpointing=True, max_steps=4, learning_rate=0.05,
        trainer={"peft_config": lora()},
    )  # fmt: skip
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[3] < losses[0] - 0.1
    assert weight.dtype == torch.uint8
    assert torch.equal(weight, before)
    trainer.save_model()
    assert all("lora" in name for name in load_file(tmp_path / "run" / "adapter_model.safetensors"))
