"""Loading by path: dtype, class, safetensors, adapters, special tokens."""

import logging
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FSMTConfig,
    FSMTForConditionalGeneration,
    LlamaForCausalLM,
)

from tests.models.words import word_tokenizer
from tests.tiny import tiny_model
from trl.models.loading import (
    apply_special_tokens,
    create_model_from_path,
    get_config_model_id,
    load_processing_class,
)
from trl.models.peft import resolve_dtype
from trl.models.setup import check_processing_class


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a bfloat16 Llama and a tokenizer that has eos and no pad."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(folder)
    word_tokenizer(eos_token="</s>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("bfloat16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_resolve_dtype(given, expected):
    assert resolve_dtype(given) == expected


@pytest.mark.parametrize("given", ["float7", "int32", "nn", 16])
def test_resolve_dtype_names_what_is_allowed(given):
    with pytest.raises(ValueError, match=r"dtype must be 'auto'"):
        resolve_dtype(given)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": torch.float64}, torch.float64),
        ({"torch_dtype": "float16"}, torch.float16),
    ],
)
def test_dtype_is_the_checkpoints_own_unless_given(saved, options, dtype):
    assert create_model_from_path(saved, **options).dtype == dtype


def test_device_map_over_all_devices_needs_one_process(saved, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device_map"):
        create_model_from_path(saved, device_map="auto")


def test_class_comes_from_the_config_or_the_caller(saved):
    model = create_model_from_path(saved)
    assert type(model) is LlamaForCausalLM
    assert get_config_model_id(model.config) == saved
    torch.testing.assert_close(model.lm_head.weight, tiny_model("llama", dtype=torch.bfloat16).lm_head.weight)
    scorer = create_model_from_path(saved, AutoModelForSequenceClassification, num_labels=1)
    assert scorer.score.out_features == 1
    assert get_config_model_id(tiny_model("llama").config) == ""


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./no-such-folder", "outputs/run/no-such-checkpoint", "owner/no-such"]
)
def test_missing_models(name):
    for architecture in (None, AutoModelForSequenceClassification):
        with pytest.raises(FileNotFoundError, match=r"no-such|/no/such"):
            create_model_from_path(name, architecture)


@pytest.mark.parametrize("architecture", [None, AutoModelForSequenceClassification])
def test_a_folder_of_models_is_no_model(saved, tmp_path, architecture):
    shutil.copytree(saved, tmp_path / "run" / "small")
    with pytest.raises(FileNotFoundError, match=r"run'"):
        create_model_from_path(str(tmp_path / "run"), architecture)
    assert create_model_from_path(str(tmp_path / "run"), subfolder="small").dtype == torch.bfloat16


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_a_folder_without_tokenizer_files_is_said(architecture, tmp_path):
    """transformers makes a tokenizer of one special token of it."""
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no vocabulary"):
        check_processing_class(load_processing_class(str(tmp_path)))


def test_files_that_lack_weights_are_refused(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "layers.1." in name)
    save_file(
        {key: value for key, value in weights.items() if key != name},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    for architecture in (None, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match=rf"lacks 1 weights of Llama\w+ \({name}\).*allow_missing_weights"):
            create_model_from_path(str(tmp_path), architecture)
    loaded = create_model_from_path(str(tmp_path), allow_missing_weights=True)
    assert torch.isfinite(loaded.state_dict()[name]).all()


def fsmt(*, tied: bool) -> FSMTForConditionalGeneration:
    """An encoder-decoder whose three embeddings are one tensor, or three."""
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | dict.fromkeys(
        ("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16
    )
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    vocabulary = {"langs": ["en", "de"], "src_vocab_size": 40, "tgt_vocab_size": 40}
    config = FSMTConfig(**vocabulary, **sizes, **heads, max_position_embeddings=32, tie_word_embeddings=tied)
    return FSMTForConditionalGeneration(config)


@pytest.mark.parametrize("name", ["decoder.embed_tokens", "encoder.embed_tokens", "decoder.output_projection"])
def test_a_tensor_that_is_tied_to_another_may_lack_in_the_file(name, tmp_path):
    model = fsmt(tied=True)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys() | {f"model.{name}.weight"}
    weights = {key: value.clone() for key, value in model.state_dict().items() if "embed_tokens" in key or key in names}
    weights["model.decoder.output_projection.weight"] = weights["model.decoder.embed_tokens.weight"].clone()
    del weights[f"model.{name}.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = create_model_from_path(str(tmp_path)).state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in model.state_dict().items())
    fsmt(tied=False).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"lacks 1 weights of FSMT.* \(model.{name}.weight\)"):
        create_model_from_path(str(tmp_path), FSMTForConditionalGeneration)


def test_a_new_classification_head_is_no_missing_weight_and_a_new_output_head_is(saved, tmp_path):
    reward = create_model_from_path(saved, AutoModelForSequenceClassification, num_labels=1)
    assert reward.score.weight.shape[0] == 1
    reward.save_pretrained(tmp_path)  # which has no head over the vocabulary
    with pytest.raises(ValueError, match=r"lacks 1 weights of LlamaForCausalLM \(lm_head\.weight\)"):
        create_model_from_path(str(tmp_path), AutoModelForCausalLM)


def test_pickled_weights_are_refused(tmp_path):
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin.*safetensors"):
        create_model_from_path(str(tmp_path))


def test_unknown_architecture(tmp_path):
    model = tiny_model("llama")
    model.config.architectures = ["NoSuchForCausalLM"]
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"NoSuchForCausalLM.*trust_remote_code.*trust the code"):
        create_model_from_path(str(tmp_path))


def test_an_adapter_folder_loads_ready_to_train(saved, tmp_path):
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(create_model_from_path(saved, dtype="float32"), config)
    adapted.save_pretrained(tmp_path)
    loaded = create_model_from_path(str(tmp_path), dtype="float32")
    assert isinstance(loaded, PeftModel)
    assert {name.split(".")[-3] for name, p in loaded.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }
    ids = torch.tensor([[4, 5, 6]])
    torch.testing.assert_close(loaded(ids).logits, adapted.eval()(ids).logits, atol=1e-6, rtol=0)


def test_eos_pads_where_there_is_no_pad_token(saved, caplog):
    with caplog.at_level(logging.INFO, logger="trl.models.loading"):
        tokenizer = load_processing_class(saved)
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("</s>", "</s>")
    assert caplog.text.count("no pad token") == 1


@pytest.mark.parametrize("field", ["eos_token", "pad_token"])
def test_special_tokens_must_be_in_the_vocabulary(field):
    with pytest.raises(ValueError, match=rf"{field} '<\|im_end\|>' is not in the vocabulary"):
        apply_special_tokens(word_tokenizer(), **{field: "<|im_end|>"})


def test_no_tokenizer_beside_the_model(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="processing_class"):
        load_processing_class(str(tmp_path))
    with pytest.raises(ValueError, match="processing_class"):
        load_processing_class(tiny_model("llama"))


@pytest.mark.parametrize("content", [b"", bytes(5000), None])
def test_damaged_weights_are_named(content, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500] if content is None else content)
    with pytest.raises(ValueError, match=r"has damaged weights: model.safetensors cannot be read, it may be trunc"):
        create_model_from_path(str(tmp_path))
