"""Models with a value head: what their forward returns, how they load and save, and what they refuse."""

import json
import logging
import os
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_classifier, tiny_model, tiny_seq2seq
from trl.models.value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])
MASK = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
Causal, Seq2Seq = AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead


def lora(**settings):
    return LoraConfig(task_type="CAUSAL_LM", r=4, **settings)


def bits(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("qwen3", {}),
        ("gpt_neox", {}),
        ("bloom", {}),
        ("opt", {"word_embed_proj_dim": 16}),
        ("qwen2_moe", {}),
    ],
)
def test_values_are_the_head_of_the_last_hidden_states(architecture, overrides):
    inner = tiny_model(architecture, **overrides)
    model = Causal.from_pretrained(inner).eval()
    logits, loss, values = model(input_ids=IDS, attention_mask=MASK)
    hidden = inner.get_decoder()(input_ids=IDS, attention_mask=MASK).last_hidden_state
    expected = hidden @ model.v_head.summary.weight[0] + model.v_head.summary.bias
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits, inner(input_ids=IDS, attention_mask=MASK).logits)
    assert loss is None
    assert values.shape == (2, 6)


@pytest.mark.filterwarnings("error::FutureWarning")  # transformers' name of the cache is a new one from 5.24 on
def test_a_cache_continues_a_row():
    model = Causal.from_pretrained(tiny_model("llama")).eval()
    logits, _, values = model(input_ids=IDS)
    *_, cache = model(input_ids=IDS[:, :4], return_past_key_values=True, use_cache=True)
    next_logits, _, next_values = model(input_ids=IDS[:, 4:], past_key_values=cache)
    torch.testing.assert_close(next_logits, logits[:, 4:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(next_values, values[:, 4:], rtol=1e-5, atol=1e-6)


def test_an_encoder_decoders_values_are_of_its_decoder():
    inner = tiny_seq2seq("t5")
    model = Seq2Seq.from_pretrained(inner).eval()
    decoder_ids = torch.tensor([[0, 4, 5], [0, 6, 7]])
    logits, _, values = model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=decoder_ids)
    outputs = inner(IDS, attention_mask=MASK, decoder_input_ids=decoder_ids, output_hidden_states=True)
    torch.testing.assert_close(values, model.v_head(outputs.decoder_hidden_states[-1])[..., 0], rtol=1e-6, atol=1e-6)
    assert logits.shape == (2, 3, 96)
    with_labels = model(input_ids=IDS, attention_mask=MASK, labels=decoder_ids)
    torch.testing.assert_close(with_labels[1], inner(IDS, attention_mask=MASK, labels=decoder_ids).loss)


def test_the_head_is_float32_whatever_the_model_is():
    model = Causal.from_pretrained(tiny_model("llama", dtype=torch.bfloat16)).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, _, values = model(input_ids=IDS)
    assert (logits.dtype, values.dtype, model.v_head.summary.weight.dtype) == (torch.float32,) * 3
    assert model.dtype == torch.bfloat16


def test_initial_weights_and_dropout_are_as_asked():
    torch.manual_seed(0)
    normal = Causal.from_pretrained(
        tiny_model("gpt2", n_embd=256), v_head_init_strategy="normal", v_head_initializer_range=0.5
    )
    assert normal.v_head.summary.weight.std().item() == pytest.approx(0.5, rel=0.2)
    assert not normal.v_head.summary.bias.any()
    assert normal.v_head.dropout.p == 0.1
    assert Causal.from_pretrained(tiny_model("gpt2"), summary_dropout_prob=0.0).v_head.dropout.p == 0.0
    assert sorted(name for name, _ in normal.v_head.named_parameters()) == ["summary.bias", "summary.weight"]


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2_moe"])
def test_saved_and_loaded_are_the_same_bits(tmp_path, architecture, shard):
    model = Causal.from_pretrained(tiny_model(architecture), v_head_init_strategy="normal")
    model.save_pretrained(tmp_path, max_shard_size=shard)
    files = [name for name in os.listdir(tmp_path) if name.endswith(".safetensors")]
    assert (len(files) > 1) == (shard == "20KB")
    weights = {key for file in files for key in load_file(tmp_path / file)}
    assert {key for key in weights if key.startswith("v_head.")} == {
        "v_head.summary.weight",
        "v_head.summary.bias",
    }
    assert not any(key.startswith("pretrained_model.") for key in weights)
    assert same(bits(Causal.from_pretrained(str(tmp_path))), bits(model))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)  # a checkpoint like any other
    assert same(bits(plain), bits(model.pretrained_model))


def test_loading_says_nothing_of_the_value_head_and_still_tells_of_real_oddities(tmp_path, caplog, monkeypatch):
    model = Causal.from_pretrained(tiny_model("llama"))
    model.save_pretrained(tmp_path, state_dict={**model.state_dict(), "stray.weight": torch.ones(1)})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")
    Causal.from_pretrained(str(tmp_path))
    assert "stray.weight" in caplog.text
    caplog.clear()
    model.save_pretrained(tmp_path)
    Causal.from_pretrained(str(tmp_path))
    assert "v_head" not in caplog.text


def test_state_dict_has_a_checkpoints_names_and_goes_back_in():
    model = Causal.from_pretrained(tiny_model("llama"))
    state = model.state_dict()
    assert "model.embed_tokens.weight" in state
    assert "v_head.summary.weight" in state
    other = Causal.from_pretrained(tiny_model("llama", seed=1))
    assert not other.load_state_dict(state).missing_keys
    assert same(bits(other), bits(model))
    own_names = {f"pretrained_model.{k}" if not k.startswith("v_head.") else k: v for k, v in state.items()}
    third = Causal.from_pretrained(tiny_model("llama", seed=2))
    third.load_state_dict(own_names)
    assert same(bits(third), bits(model))
    outer = torch.nn.ModuleDict({"policy": third})
    assert not outer.load_state_dict({f"policy.{name}": value for name, value in state.items()}).unexpected_keys


def test_an_adapter_is_saved_alone_with_the_head_beside_it(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = Causal.from_pretrained(str(tmp_path / "base"), peft_config=lora(init_lora_weights=False)).eval()
    assert model.is_peft_model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"v_head.summary.weight", "v_head.summary.bias"} < trained
    assert all("lora" in name or name.startswith("v_head") for name in trained)
    model.save_pretrained(tmp_path / "out")
    assert {"adapter_model.safetensors", "value_head.safetensors"} <= set(os.listdir(tmp_path / "out"))
    again = Causal.from_pretrained(str(tmp_path / "out")).eval()
    assert same(bits(again), bits(model))
    assert {n for n, p in again.named_parameters() if p.requires_grad} == trained
    for found, expected in zip(again(IDS)[::2], model(IDS)[::2], strict=True):
        assert torch.equal(found, expected)
    frozen = Causal.from_pretrained(str(tmp_path / "out"), is_trainable=False)
    assert {n for n, p in frozen.named_parameters() if p.requires_grad} == {n for n in trained if "v_head" in n}


def test_the_head_of_an_adapter_does_not_outlive_it(tmp_path):
    Causal.from_pretrained(tiny_model("llama"), peft_config=lora()).save_pretrained(tmp_path)
    whole = Causal.from_pretrained(tiny_model("llama"), v_head_init_strategy="normal")
    whole.save_pretrained(tmp_path)
    found = Causal.from_pretrained(str(tmp_path)).v_head
    assert torch.equal(found.summary.weight, whole.v_head.summary.weight)


def test_a_peft_model_is_taken_as_it_is_or_merged_before_a_new_adapter():
    adapted = get_peft_model(tiny_model("llama"), lora())
    assert Causal.from_pretrained(adapted).pretrained_model is adapted
    torch.nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    expected = adapted.eval()(input_ids=IDS).logits.detach()
    again = Causal.from_pretrained(adapted, peft_config=lora()).pretrained_model.eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_work_is_named(tmp_path):
    with pytest.raises(TypeError, match="one of AutoModelForCausalLM"):
        Causal.from_pretrained(tiny_seq2seq("t5"))
    with pytest.raises(TypeError, match="one of AutoModelForSeq2SeqLM"):
        Seq2Seq.from_pretrained(tiny_model("llama"))
    with pytest.raises(TypeError, match="LlamaForSequenceClassification"):
        Causal.from_pretrained(tiny_classifier("llama"))
    with pytest.raises(TypeError, match="PreTrainedModel"):
        Causal.from_pretrained(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="v_head_init_strategy must be None or 'normal', got 'zeros'"):
        Causal.from_pretrained(tiny_model("llama"), v_head_init_strategy="zeros")
    with pytest.raises(FileNotFoundError, match="no folder"):
        Causal.from_pretrained("/nowhere/at/all")
    with pytest.raises(ValueError, match="compute_reward_score needs"):
        Causal.from_pretrained(tiny_model("llama")).compute_reward_score(IDS)


def test_a_head_of_another_width_is_an_error(tmp_path):
    model = Causal.from_pretrained(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"shape \(1, 8\), expected \(1, 32\)"):
        model.post_init({"v_head.summary.weight": torch.zeros(1, 8), "v_head.summary.bias": torch.zeros(1)})


def test_a_pickled_head_is_not_loaded_and_said(tmp_path, caplog):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    adapted = PeftModel(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora())
    adapted.save_pretrained(tmp_path / "old")
    head = {"v_head.summary.weight": torch.full((1, 32), 0.5), "v_head.summary.bias": torch.ones(1)}
    torch.save(head, tmp_path / "old" / "pytorch_model.bin")
    config = json.loads((tmp_path / "old" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "old" / "adapter_config.json").write_text(json.dumps(config))
    Causal.from_pretrained(str(tmp_path / "old"))
    assert "pickled value head" in caplog.text
    caplog.clear()
    read = Causal.from_pretrained(str(tmp_path / "old"), pickled_value_head=True)
    assert torch.equal(read.v_head.summary.weight, head["v_head.summary.weight"])
    assert "pickled" not in caplog.text


class Runs:
    """An object whose pickle calls a function when it is loaded."""

    def __reduce__(self):
        return os.makedirs, ("/nowhere/was/run",)


def test_pickled_checkpoints_of_trl_are_read_on_request(tmp_path):
    model = Causal.from_pretrained(tiny_model("llama"), v_head_init_strategy="normal")
    model.config.save_pretrained(tmp_path)
    torch.save(dict(model.state_dict()), tmp_path / "pytorch_model.bin")
    assert same(bits(Causal.from_pretrained(str(tmp_path), use_safetensors=False)), bits(model))


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    torch.save({"v_head.summary.weight": Runs()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        Causal.from_pretrained(str(tmp_path), pickled_value_head=True)
