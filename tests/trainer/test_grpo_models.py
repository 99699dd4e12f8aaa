"""GRPO and RLOO on models of several kinds: adapters, mixtures of experts, references that move, heads in float32."""

import pytest
import torch
from peft import IA3Config, LoraConfig
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_model
from tests.trainer.grpo_runs import logs, make, run

TARGETS = ["q_proj", "v_proj"]
ADAPTERS = {
    "lora": LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "rslora, all layers": LoraConfig(
        r=2, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM"
    ),
    "dora": LoraConfig(r=2, target_modules=TARGETS, use_dora=True, task_type="CAUSAL_LM"),
    "with the head": LoraConfig(
        r=2, target_modules=TARGETS, modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    ),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
}  # fmt: skip


def bits(model):
    """The weights below an adapter, by their names."""
    own = ("lora_", "ia3_", "modules_to_save.default")
    return {n: p.detach().clone() for n, p in model.named_parameters() if not any(part in n for part in own)}


@pytest.mark.parametrize(
    ("method", "kind"), [*(("grpo", kind) for kind in ADAPTERS), ("rloo", "lora"), ("rloo", "with the head")]
)
def test_the_base_is_never_written_to(method, kind):
    """In bfloat16, where merging and unmerging an adapter would leave its rounding: looked at in every forward."""
    settings = {"dtype": "bfloat16", "architecture": "llama", "learning_rate": 0.5, "num_iterations": 2}
    trainer, _ = make(method, **settings, given={"peft_config": ADAPTERS[kind]})
    before, seen = bits(trainer.model), []
    base = trainer.model.get_base_model()

    def look(*_):
        seen.append(all(torch.equal(value, before[name]) for name, value in bits(trainer.model).items()))

    base.get_decoder().layers[-1].register_forward_pre_hook(look)
    trainer.train()
    trainer.make_rollout_batch(9)
    look()
    assert seen and all(seen)
    assert all(not getattr(part, "merged", False) for part in trainer.model.modules())
    assert any(entry.get("kl", 0) for entry in logs(trainer))
    assert trainer.ref_model is None


# ---- mixtures of experts


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_the_routers_loss_is_added(method):
    """The gradient is that of the plain loss and of 0.1 times the router's, whatever the micro-batches."""

    def one(**more):
        model = tiny_model("mixtral", **more)
        return run(method, given={"model": model}, max_steps=1, dtype="float32")

    options = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    (plain, without), (routed, found) = one(), one(**options)
    first = logs(routed)[0]
    assert first["loss"] == pytest.approx(logs(plain)[0]["loss"] + 0.1 * first["aux_loss"], abs=1e-5)
    assert "aux_loss" not in logs(plain)[0]
    gates = [name for name in found.steps[0] if "gate" in name and "mlp.gate." in name]
    assert gates and any((found.steps[0][n] - without.steps[0][n]).abs().max() > 1e-5 for n in gates)
    metrics = routed.evaluate(routed.train_dataset.select(range(4)))
    assert metrics["eval_aux_loss"] > 0


# ---- references that move


# ---- heads in float32, and methods of the documented surface


def test_a_tied_head_in_float32_is_saved_and_resumed(tmp_path):
    def trained(steps, **settings):
        model = tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
        saving = {"folder": tmp_path, "save_strategy": "steps", "save_steps": 1}
        trainer, _ = make(given={"model": model}, cast_lm_head_to_fp32=True, max_steps=steps, **saving, **settings)
        return trainer

    start = trained(2)
    start.train()
    start.save_model(tmp_path / "end")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert not torch.equal(loaded.lm_head.weight, loaded.get_input_embeddings().weight)
    again = trained(2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for name, value in start.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_tokens_of_high_entropy():
    """Of the five in the mask the 0.75 quantile is 4."""
    trainer, _ = make()
    entropies = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = trainer.get_high_entropy_mask(entropies, mask, 0.75)
    assert found.tolist() == [[False, False, False], [False, True, True]]
    assert trainer.get_high_entropy_mask(entropies, mask, 0.0).equal(mask.bool())


def test_the_older_liger_loss_is_the_loss():
    trainer, _ = make()
    batch = trainer.micro_batch(trainer.advantages(trainer.make_rollout_batch(0)))
    trainer.model.train()
    first = trainer.compute_liger_loss(trainer.model, batch)
    torch.testing.assert_close(first, trainer.compute_loss(trainer.model, batch), rtol=0, atol=0)
    with pytest.warns(FutureWarning, match="use_liger_loss -> nothing"):
        make(use_liger_loss=True)


def test_older_arguments_of_rloo_move():
    words = make("rloo")[0].processing_class
    trainer, _ = make("rloo")
    from trl import RLOOTrainer

    given = {
        "config": trainer.args,
        "policy": tiny_model("gpt2"),
        "reward_model": lambda completions, **_: [0.0],
    }
    with pytest.warns(FutureWarning, match="config -> the argument args; policy -> the argument model"):
        made = RLOOTrainer(**given, train_dataset=trainer.train_dataset, tokenizer=words)
    assert (made.args.temperature, trainer.args.temperature) == (0.7, 1.0)  # what 0.21 had by default
    assert made.model is given["policy"]
    with pytest.raises(ValueError, match="policy and model were both given"):
        RLOOTrainer(given["policy"], given["reward_model"], policy=given["policy"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'policies'"):
        RLOOTrainer(policies=1)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_dropout_is_no_change_of_the_policy_in_the_first_step_on_a_window(method):
    model = tiny_model("gpt2", dtype=torch.float64, resid_pdrop=0.1, attn_pdrop=0.1)
    trainer, keep = run(method, given={"model": model}, num_iterations=2, max_steps=4, learning_rate=1e-3)
    clipped = [entry["clip_ratio/region_mean"] for entry in logs(trainer)]
    assert clipped[0] == clipped[2] == 0 and min(clipped[1], clipped[3]) > 0.2
    assert all(max(value.abs().max() for value in step.values()) > 0.01 for step in keep.steps)
