"""One base model, two adapters: the reward adapter's scores are the reward model's, and the policy is left as it was."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from tests.tiny import tiny_model
from trl.models.value_head import AutoModelForCausalLMWithValueHead

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
MASK = torch.ones_like(IDS)


@pytest.fixture
def folders(tmp_path):
    """A base model, and an adapter that was trained as a reward model over it."""
    base, adapter = str(tmp_path / "base"), str(tmp_path / "reward")
    tiny_model("llama").save_pretrained(base)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False)).eval()
    model.save_pretrained(adapter)
    return base, adapter, model(input_ids=IDS, attention_mask=MASK).logits.detach()


def policy(base, adapter, **settings):
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    return AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=lora, reward_adapter=adapter, **settings)


def test_scores_are_the_reward_models_and_the_policy_is_untouched(folders):
    base, adapter, expected = folders
    model = policy(base, adapter).train()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert not any("reward_adapter" in name or name.startswith("score") for name in trained)
    before, stream = model.eval()(IDS)[0].detach(), torch.get_rng_state()
    model.train()
    scores = model.compute_reward_score(IDS, MASK)
    assert scores.shape == (2, 4, 1)
    assert not scores.requires_grad
    torch.testing.assert_close(scores[:, -1], expected, rtol=1e-6, atol=1e-6)
    assert model.training
    assert torch.equal(torch.get_rng_state(), stream)
    assert model.pretrained_model.active_adapter == "default"
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    assert torch.equal(model.eval()(IDS)[0], before)


def test_it_is_added_to_a_peft_model_too(folders):
    _, adapter, _ = folders
    model = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", r=4))
    head = AutoModelForCausalLMWithValueHead.add_and_load_reward_modeling_adapter(model, adapter)
    assert head.weight.shape == (1, 32)
    assert set(model.peft_config) == {"default", "reward_model_adapter"}
    with pytest.raises(ValueError, match="'reward_model_adapter' is taken"):
        AutoModelForCausalLMWithValueHead.add_and_load_reward_modeling_adapter(model, adapter)


def test_what_cannot_work_is_named(folders, tmp_path):
    base, adapter, _ = folders
    with pytest.raises(TypeError, match="reward_adapter needs a PeftModel"):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, reward_adapter=adapter)
    headless = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", r=4))
    headless.save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match="has no score head"):
        policy(base, str(tmp_path / "headless"))
