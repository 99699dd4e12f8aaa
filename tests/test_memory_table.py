"""The table of memory by model size: its exact part is what a dry run counts, and the page has today's table."""

from pathlib import Path

import pytest
from examples.memory_table import GIB, MODELS, WAYS, count, estimate, state_bytes, table
from examples.small_model import built_in, small_llama, train_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from trl import SFTConfig, SFTTrainer, make_data
from trl.scripts.report import memory

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "out_of_memory.md"


def test_the_page_has_the_table_of_today():
    assert table(MODELS, 4096) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "weights"),
    [("Qwen3 0.6B", 596_049_920), ("Qwen3 8B", 8_190_735_360), ("Llama 3.1 8B", 8_030_261_248)],
)
def test_configs_have_the_published_sizes(name, weights):
    counts = count(MODELS[name])
    assert counts.layers + counts.others == weights


def test_adapters_are_counted_as_peft_makes_them():
    from peft import LoraConfig, get_peft_model

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=16, target_modules="all-linear"))
    assert count(config).adapters == model.get_nb_trainable_parameters()[0]


def test_the_state_is_what_a_dry_run_counts(tmp_path):
    tokenizer = train_tokenizer(built_in(), vocabulary=512)
    model = small_llama(tokenizer, seed=0, layers=1, width=64)
    args = SFTConfig(str(tmp_path), report_to="none", use_cpu=True)
    rows = make_data("chats", rows=8)["train"]
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    assert sum(memory(trainer).values()) == state_bytes(count(model.config), WAYS[0])


def test_more_tokens_take_more_and_less_trains_in_less():
    config = MODELS["Qwen3 8B"]
    sizes = [estimate(config, way, 4096) / GIB for way in WAYS]
    assert sizes == sorted(sizes, reverse=True)
    assert all(estimate(config, way, 8192) > estimate(config, way, 4096) for way in WAYS)
