"""LoRA on mixtures of experts: experts by `target_parameters`, routers left alone by `all-linear`."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.architectures import model_of
from tests.models.test_peft import trainer_args
from tests.tiny import tiny_model
from tests.trainer import dpo_runs
from tests.trainer.sft_runs import BLUE, USER, logged, make, model_for
from trl.models.adapter_targets import CHOOSERS, resolve_targets
from trl.models.peft import prepare_peft_model

FUSED = {  # names of the experts' tensors within a layer
    **dict.fromkeys((
        "afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
        "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "hunyuan_v1_moe", "kimi_linear", "laguna",
        "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe",
        "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
    ), ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
    **dict.fromkeys(
        ("jamba", "lfm2_moe", "llama4_text"), ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
    ),
    "nemotron_h": ("mixer.experts.up_proj", "mixer.experts.down_proj"),
    "jetmoe": ("mlp.input_linear.weight", "mlp.output_linear.weight"),
}  # fmt: skip
IDS = torch.tensor([[5, 7, 9, 4, 2, 11, 33, 41, 8, 3]])
ROWS = [{"messages": [USER, BLUE]}, {"messages": [USER, {"role": "assistant", "content": "Look up."}]}] * 2


def exact(model_type):
    """The model in float64: the fused products of experts have half and single precision only."""
    return model_of(model_type, dtype=torch.float64, experts_implementation="eager")


def loss_of(model):
    return model(input_ids=IDS, labels=IDS).loss


def adapted(model, **settings):
    config = LoraConfig(r=2, init_lora_weights=False, **settings)
    torch.manual_seed(1)
    return prepare_peft_model(model, config, trainer_args()).eval()


def layers_of(model):
    """The adapter's layers; of nested ones, each."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def weight_of(layer):
    return layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight


@pytest.mark.parametrize("model_type", FUSED)
def test_experts_are_adapted_and_routers_are_not(model_type, tmp_path):
    base = exact(model_type)
    expected_base = loss_of(base).item()
    fused = {name for name, _ in base.named_parameters() if name.endswith(FUSED[model_type])}
    model = adapted(base, target_modules="all-linear", target_parameters=list(FUSED[model_type]))
    layers = layers_of(model)
    assert not {name for name in layers if CHOOSERS & set(name.split("."))}
    names = {id(parameter): name for name, parameter in base.named_parameters()}
    targets = {names[id(weight_of(layer))].replace(".base_layer", "") for layer in layers.values()}
    assert fused and fused <= targets
    assert not {name for name in targets if CHOOSERS & set(name.split("."))}

    loss = loss_of(model)
    loss.backward()
    with model.disable_adapter():
        assert loss_of(model).item() == expected_base
    model.save_pretrained(tmp_path)
    assert loss_of(PeftModel.from_pretrained(exact(model_type), tmp_path)).item() == loss.item()

    # Of the merged model: the same loss, and by the chain rule from its weights the same gradients.
    deltas = [(layer, layer.get_delta_weight("default")) for layer in layers.values()]
    merged = model.merge_and_unload().requires_grad_(True)
    merged_loss = loss_of(merged)
    assert merged_loss.item() == pytest.approx(loss.item(), abs=1e-10)
    assert abs(loss.item() - expected_base) > 1e-3
    merged_loss.backward()
    for layer, delta in deltas:
        matrices = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        product = (delta * weight_of(layer).grad).sum()
        for matrix, gradient in zip(matrices, torch.autograd.grad(product, matrices), strict=True):
            assert matrix.grad.any()
            torch.testing.assert_close(matrix.grad, gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("model_type", "left_out"),
    [("llama4_text", 0), ("phimoe", 0), ("nemotron_h", 1), ("deepseek_v3", 0), ("hunyuan_v1_moe", 0), ("laguna", 3)],
)
def test_all_linear_is_all_but_head_routers_and_experts(model_type, left_out):
    """PEFT by itself: routers that return tuples crash (Llama 4, Phi-3.5), `out_proj` of state spaces is refused
    (Nemotron-H), routers and experts are added in place of the shared experts (DeepSeek), which are lost (Laguna)."""
    base = exact(model_type)
    linear = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    expected = {name for name in linear if not CHOOSERS & set(name.split("."))} - {"lm_head"}
    model = adapted(base, target_modules="all-linear", lora_dropout=0.05)
    adapters = {name.removeprefix("base_model.model.") for name in layers_of(model)}
    assert adapters <= expected and len(expected - adapters) == left_out
    loss_of(model).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_a_model_that_peft_has_no_targets_for_gets_all_linear(caplog):
    model = adapted(exact("gpt_oss"))
    assert {name.rpartition(".")[2] for name in layers_of(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "target_parameters=['mlp.experts.down_proj', 'mlp.experts.gate_up_proj']" in caplog.text


@pytest.mark.parametrize(
    ("entry", "near"),
    [
        ("mlp.experts.gate_proj", r"mlp\.experts\.gate_up_proj"),
        ("self_attn.q_proj", r"self_attn\.q_proj\.weight"),
        ("w1", r"mlp\.experts\.down_proj, mlp\.experts\.gate_up_proj"),
    ],
)
def test_a_name_that_no_parameter_has(entry, near):
    names = ["mlp.experts.down_proj", entry]
    with pytest.raises(ValueError, match=rf"'{entry}', but no parameter of Qwen3MoeForCausalLM .*{near}"):
        adapted(model_of("qwen3_moe"), target_parameters=names)


def test_the_settings_of_the_caller_stay(caplog):
    config = LoraConfig(target_modules="all-linear", target_parameters=["experts.down_proj"], lora_dropout=0.1)
    before = copy.deepcopy(config)
    resolved = resolve_targets(model_of("qwen3_moe"), config)
    assert config == before
    assert (resolved.lora_dropout, resolved.target_parameters) == (0.0, ["experts.down_proj"])
    assert "lora_dropout=0.1 is not used" in caplog.text


def test_experts_are_trained_saved_and_resumed(tmp_path):
    def trainer():
        config = LoraConfig(r=4, target_modules="all-linear", target_parameters=list(FUSED["qwen3_moe"]))
        return make(
            ROWS, model=model_for(architecture="qwen3_moe"), folder=tmp_path, gradient_checkpointing=True, max_steps=4,
            trainer={"peft_config": config}, save_strategy="steps", save_steps=2, learning_rate=0.02,
        )  # fmt: skip

    whole, resumed = trainer(), trainer()
    whole.train()
    losses = logged(whole, "loss")
    assert losses[3] < losses[0] - 0.1
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed, "loss") == losses
    ends = [{name: x for name, x in run.model.named_parameters() if x.requires_grad} for run in (whole, resumed)]
    assert sum("experts" in name for name in ends[0]) == 2 * 2 * 2  # A and B of two tensors in two layers
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    whole.save_model()
    loaded = PeftModel.from_pretrained(model_for(architecture="qwen3_moe"), tmp_path)
    assert loss_of(loaded.eval()).item() == loss_of(whole.model.eval()).item()


@pytest.mark.parametrize("is_second", [False, True])
def test_the_reference_of_adapted_experts_is_the_base_or_a_second_adapter(is_second):
    """A new adapter changes nothing yet, and the second has the first one's weights: losses begin at log 2."""
    names = list(FUSED["qwen3_moe"])
    config = LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=not is_second)
    model = tiny_model("qwen3_moe", dtype=torch.float64, experts_implementation="eager")
    settings = {"model": model, "peft_config": config}
    if is_second:
        model = get_peft_model(model, config)
        model.add_adapter("reference", config)
        model.load_state_dict({
            name.replace(".default.", ".reference."): x for name, x in model.state_dict().items() if ".default." in name
        }, strict=False)  # fmt: skip
        settings = {"model": model, "model_adapter_name": "default", "ref_adapter_name": "reference"}
    trainer = dpo_runs.make(**settings, max_steps=2, learning_rate=0.02, logging_steps=1)
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[1] < losses[0] - 1e-3
