"""Weights by parts are those of the whole, bit for bit, and no more than a part is gathered or copied at any moment."""

import json
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.generation.weight_parts_worker import KINDS, checkpoint_weights, policy_of
from tests.ports import free_port
from tests.tiny import tiny_model
from tests.two_processes import Program, launch, need_deepspeed
from trl.generation.serving.connection import VARIABLE
from trl.generation.vllm import weights as weight_parts
from trl.generation.vllm.weights import WeightParts


def read(parts):
    with parts.read() as weights:
        return dict(weights)


@pytest.mark.parametrize("kind", [*KINDS, "gpt2", "gpt_neox", "phi3", "qwen2_moe"])
def test_parts_are_the_whole(kind):
    """Names, bits, and what is told of them before: layers by themselves, and the rest apart from them."""
    policy = policy_of(kind)
    parts, whole = WeightParts(policy), checkpoint_weights(policy)
    found = read(parts)
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    assert list(parts.shapes) == list(found)
    for name, shape in parts.shapes.items():
        assert (shape.shape, shape.dtype, shape.device.type) == (whole[name].shape, whole[name].dtype, "meta")
    numbers = [{name for name in ("0", "1") if f".{name}." in f".{part[0].place}."} for part in parts.parts]
    assert numbers.count({"0"}) == numbers.count({"1"}) == 1 and len(parts.parts) >= 5
    own = {parameter.data_ptr() for parameter in policy.parameters()}
    copied = {name for name, weight in found.items() if weight.data_ptr() not in own}
    if kind == "lora":
        assert copied == {f"model.layers.{n}.{m}.weight" for n in (0, 1) for m in ("self_attn.q_proj", "mlp.down_proj")}
    elif kind in ("tied", "gpt2", "gpt_neox", "phi3"):
        assert not copied


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_matrices_are_read_in_the_dtype_of_mixed_precision(kind):
    policy = policy_of(kind)
    parts, whole = WeightParts(policy, torch.bfloat16), checkpoint_weights(policy)
    found = read(parts)
    for name, weight in whole.items():
        expected = weight.bfloat16() if weight.ndim > 1 else weight
        torch.testing.assert_close(found[name], expected, rtol=0, atol=0)
        assert parts.shapes[name].dtype == expected.dtype
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16, torch.float32}


def test_sums_are_made_for_one_layer_at_a_time():
    policy = get_peft_model(
        tiny_model("llama", num_hidden_layers=4),
        LoraConfig(target_modules="all-linear", init_lora_weights=False),
    )
    own = {parameter.data_ptr() for parameter in policy.parameters()}
    alive, most = weakref.WeakSet(), 0
    inner = weight_parts.WeightParts._converted

    class Watched(WeightParts):
        def _converted(self, part, *shape_of):
            found = inner(self, part, *shape_of)
            if not shape_of:
                alive.update(weight for weight in found.values() if weight.data_ptr() not in own)
            return found

    with Watched(policy).read() as weights:
        count = 0
        for _, weight in weights:
            count += weight.data_ptr() not in own
            most = max(most, len(alive))
            del weight
    assert count == 4 * 7 and most == 7


def test_a_conversion_that_joins_parts_is_made_of_the_whole(monkeypatch):
    def joined(core, weights):
        """Two layers' norms in one tensor."""
        found = dict(weights)
        norms = [found.pop(name) for name in list(found) if name.endswith("input_layernorm.weight")]
        return found | ({"norms": torch.stack(norms)} if norms else {})

    policy = tiny_model("llama")
    monkeypatch.setattr(weight_parts, "revert_weight_conversion", joined)
    parts = WeightParts(policy)
    found = read(parts)
    assert len(parts.parts) == 1 and found["norms"].shape == (2, 32)
    expected = torch.stack([layer.input_layernorm.weight for layer in policy.model.layers])
    assert torch.equal(found["norms"], expected)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", ["fsdp2", "zero3"])
def test_sharded_weights_are_gathered_by_parts(how, tmp_path, monkeypatch):
    """Two processes: the same bits, at most the largest part whole. A server that ends amid the weights and is started anew gets
    all of them; one that does not come back ends both processes."""
    need_deepspeed(how)
    from tests.generation.stand_in import TOKEN  # needs fastapi

    monkeypatch.setenv(VARIABLE, TOKEN)
    ports = [str(free_port()) for _ in range(2)]
    worker = "tests.generation.weight_parts_worker"
    servers = Program(worker, (str(tmp_path), "servers", *ports))
    launch(worker, str(tmp_path), how, *ports, timeout=300, beside=[servers])
    sent = [(tmp_path / f"{name}.txt").read_text() for name in ("dies", "dies_again")]
    assert sent[0] == sent[1]
    for process in (0, 1):
        found = json.loads((tmp_path / f"found_{process}.json").read_text())
        death = found.pop("death")
        assert death["error"] is not None and death["seconds"] < 30
        assert "No vLLM server answered" in death["error"]
        assert death["error"].startswith("in process 0: ") == (process == 1)
        for kind, bytes_of in found.items():
            assert bytes_of["parts"] == (3 if how == "fsdp2" else 5), kind
            assert bytes_of["peak"] <= bytes_of["bound"] < 0.6 * bytes_of["all"], (kind, bytes_of)
