"""Adapters over plain and 4-bit bases."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments

from tests.tiny import tiny_model
from trl.models.peft import (
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
    is_peft_model,
    prepare_peft_model,
)

IDS = torch.tensor([[1, 7, 9, 4, 2]])


def trainer_args(**changes):
    fields = {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None, "bf16": False}
    return SimpleNamespace(**{**fields, **changes})


def model_args(**changes):
    fields = {
        "use_peft": True,
        "lora_task_type": "CAUSAL_LM",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_target_parameters": None,
        "lora_modules_to_save": ["lm_head"],
        "use_rslora": True,
        "use_dora": False,
        "load_in_4bit": False,
        "load_in_8bit": False,
        "dtype": None,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": False,
        "bnb_4bit_quant_storage": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def lora(**changes):
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})


def bits(parameter):
    """A copy of the stored bytes: packed 4-bit weights read as floats may be NaN, which equals nothing."""
    return parameter.detach().clone().view(torch.uint8)


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_config_from_the_command_line():
    config = get_peft_config(model_args())
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (4, 8, 0.1, True)
    assert config.target_modules == {"q_proj", "v_proj"}
    assert config.modules_to_save == ["lm_head"]
    assert get_peft_config(model_args(use_peft=False)) is None


def test_missing_peft_names_the_extra(monkeypatch):
    monkeypatch.setattr("trl.models.peft.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'trl\[peft\]'"):
        get_peft_config(model_args())
    assert not is_peft_model(tiny_model("llama"))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("already_wrapped", [True, False])
def test_gradients_reach_every_adapter_under_checkpointing(use_reentrant, already_wrapped):
    kwargs = {"use_reentrant": use_reentrant}
    args = trainer_args(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    model = tiny_model("llama")
    model = get_peft_model(model, lora()) if already_wrapped else model
    model = prepare_peft_model(model, None if already_wrapped else lora(), args)
    assert isinstance(model, PeftModel)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    model(input_ids=IDS, labels=IDS).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(grads) == 8  # two layers, q and v, A and B
    assert all(grad is not None for grad in grads.values())
    assert all(grad.abs().sum() > 0 for name, grad in grads.items() if "lora_B" in name)


def trained(dtype=torch.float32, **changes):
    """A model with an adapter that changes what it computes."""
    torch.manual_seed(3)
    return get_peft_model(tiny_model("llama", dtype=dtype), lora(init_lora_weights=False, **changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_before_a_new_one_is_added(dtype, caplog, recwarn):
    adapted = trained(dtype, modules_to_save=["lm_head"])
    adapted.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(1.5)
    expected = adapted(input_ids=IDS).logits.detach()
    model = prepare_peft_model(adapted, lora(r=3), trainer_args())
    with model.disable_adapter():
        found = model(input_ids=IDS).logits
    # bfloat16: merging rounds each weight once, the adapter's own forward rounds its sum
    bound = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * expected.abs().max().item())
    assert {p.dtype for name, p in model.named_parameters() if "lora_" not in name} == {dtype}
    assert all(".default.weight" in name for name in trainable(model))
    assert len(trainable(model)) == 8
    assert "merged into the base, and a new one" in caplog.text
    assert not [warning for warning in recwarn if "PEFT" in str(warning.message)]


def test_an_adapter_that_cannot_be_merged_is_refused():
    prompt = get_peft_model(tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"PROMPT_TUNING cannot be merged into the base"):
        prepare_peft_model(prompt, lora(), trainer_args())
    gptq = trained()
    gptq.base_model.model.quantization_method = "gptq"
    with pytest.raises(ValueError, match="Cannot merge LORA layers"):
        prepare_peft_model(gptq, lora(), trainer_args())


def test_an_adapter_is_merged_into_a_four_bit_base(four_bit, caplog):
    dequantize = pytest.importorskip("bitsandbytes").functional.dequantize_4bit
    adapted = get_peft_model(four_bit(), lora(init_lora_weights=False))
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    base = dequantize(layer.weight.data, layer.weight.quant_state).float()
    expected = base + layer.get_delta_weight("default").float()
    model = prepare_peft_model(adapted, lora(), trainer_args())
    merged = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    found = dequantize(merged.data, merged.quant_state).float()
    # half of nf4's widest gap (0.304 of the block's largest weight), and bfloat16's rounding
    assert (found - expected).abs().max() < 0.16 * expected.abs().max()
    assert (base - expected).abs().max() > 0.2 * expected.abs().max()
    assert "rounded again" in caplog.text
    assert len(trainable(model)) == 8


def test_an_adapter_loaded_for_inference_is_refused():
    model = get_peft_model(tiny_model("llama"), lora()).requires_grad_(False)
    with pytest.raises(ValueError, match="is_trainable=True"):
        prepare_peft_model(model, None, trainer_args())


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_chosen_token_rows_train(tied):
    model = tiny_model("llama", tie_word_embeddings=tied)
    config = lora(trainable_token_indices={"embed_tokens": [3, 7]})
    model = prepare_peft_model(model, config, trainer_args())
    deltas = [p for name, p in model.named_parameters() if "trainable_tokens_delta" in name]
    assert all(delta.shape == (2, 32) and delta.requires_grad for delta in deltas)
    assert deltas
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert deltas[0].grad is not None
    assert torch.isfinite(deltas[0].grad).all()


@pytest.fixture
def four_bit(tmp_path):
    tiny_model("llama", hidden_size=64, intermediate_size=64, head_dim=16, dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )

    def load(**changes):
        config = get_quantization_config(model_args(load_in_4bit=True, **changes))
        return AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=config, device_map=get_kbit_device_map(), dtype=torch.bfloat16
        )

    return load


def test_quantization_config_fields():
    config = get_quantization_config(model_args(load_in_4bit=True, dtype="float16", use_bnb_nested_quant=True))
    assert (config.bnb_4bit_compute_dtype, config.bnb_4bit_quant_storage) == (torch.float16, torch.float16)
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)
    assert get_quantization_config(model_args(load_in_4bit=True)).bnb_4bit_compute_dtype == torch.bfloat16
    assert get_quantization_config(model_args(load_in_8bit=True)).load_in_8bit
    assert get_quantization_config(model_args()) is None
    with pytest.raises(ValueError, match="cannot be combined"):
        get_quantization_config(model_args(load_in_4bit=True, load_in_8bit=True))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_four_bit_base_trains_its_adapter_only(four_bit, checkpointing):
    model = prepare_peft_model(four_bit(), lora(), trainer_args(gradient_checkpointing=checkpointing))
    base = {name: bits(p) for name, p in model.named_parameters() if "lora" not in name}
    assert model.base_model.model.model.norm.weight.dtype == torch.float32
    assert all("lora" in name for name in trainable(model))
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(bits(p), base[name]) for name, p in model.named_parameters() if name in base)


def test_four_bit_gradients_survive_an_evaluation(four_bit):
    model = prepare_peft_model(four_bit(), lora(init_lora_weights=False), trainer_args())

    def gradients():
        model.train()
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    before = gradients()
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS)
    torch.testing.assert_close(gradients(), before, atol=0, rtol=0)


def test_bf16_training_holds_the_adapter_in_bfloat16(four_bit):
    model = prepare_peft_model(four_bit(), lora(), trainer_args(bf16=True))
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtype for name, dtype in kinds.items() if "lora_" in name} == {torch.bfloat16}
    assert {dtype for name, dtype in kinds.items() if "norm" in name} == {torch.float32}
    assert {dtype for name, dtype in kinds.items() if "lm_head" in name or "embed" in name} == {torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_settings_that_are_no_config_of_peft(tmp_path):
    with pytest.raises(TypeError, match="peft_config must be a config of peft"):
        prepare_peft_model(tiny_model("llama"), {"r": 8}, TrainingArguments(str(tmp_path)))  # pyright: ignore[reportArgumentType]
