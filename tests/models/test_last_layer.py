"""The last layer at the positions that are read gives their states and all gradients as the whole layer does."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import MIXTURES_OF_EXPERTS, tiny_classifier, tiny_model
from trl.collators.trees import flatten_trees
from trl.models import last_layer
from trl.models.attention import FLAT_MODEL_TYPES
from trl.models.checkpointing import enable_gradient_checkpointing
from trl.models.classification import ClassificationScorer
from trl.models.forward import Scorer
from trl.models.last_layer import last_layer_at
from trl.models.parts import causal_core
from trl.models.scored_head import ScoreOptions
from trl.models.value_head import AutoModelForCausalLMWithValueHead
from trl.models.value_scoring import ValueScorer

# Norms of the others compute in float32 whatever the model's dtype: a last bit of float64 may turn one of theirs.
ALL_FLOAT64 = ("gpt2", "gpt_neox", "opt")
# A prompt with two branches, one with one, and one of a single token; the first token of a branch is predicted by its prompt's last.
TREES = [([5, 9, 3, 10, 7, 7, 4], [[7, 8], [9, 6, 2]]), ([4, 4], [[3, 5, 8]]), ([6], [[2, 9, 3]])]
POST_NORM = {"do_layer_norm_before": False, "word_embed_proj_dim": 16}  # OPT 350m
SHAPES = {
    **{name: {} for name in sorted(FLAT_MODEL_TYPES)},
    "gemma2": {"attn_logit_softcapping": 3.0},
    "mistral": {"sliding_window": 4},
    "opt, norms behind": POST_NORM,
    "gpt_neox, one by one": {"use_parallel_residual": False},
}


def rows():
    """Padded rows of 9, 5 and 2 tokens whose completions are scored; of the second nothing but the middle."""
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [2]])).long()
    labels = torch.where(mask.bool(), ids, -100)
    labels[0, :6] = labels[1, :2] = labels[1, 4:] = labels[2] = -100
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def trees():
    return flatten_trees(TREES).as_batch()


BATCHES = {"trees": trees, "rows": rows}


class Widths:
    """How many rows a module was given at each call."""

    def __init__(self, module):
        self.found = []
        module.register_forward_pre_hook(lambda _, given: self.found.append(given[0].shape[:-1].numel()))


def last_modules(model):
    """The last layer's feed-forward (of OPT: its second half), whatever its name."""
    return [
        module for name, module in causal_core(model).named_modules() if name.endswith(("1.mlp", "1.fc2"))
    ][-1]


def found(model, run, *, whole):
    """What `run` gives of a copy of the model and the gradients of a sum of it; `whole`: with the whole last layer."""
    model = copy.deepcopy(model)
    widths = Widths(last_modules(model))
    with pytest.MonkeyPatch.context() as patched:
        if whole:
            patched.setattr(last_layer, "_WORTH_IT", 0.0)
        values = run(model)
        (values * torch.sin(torch.arange(values.numel())).view_as(values)).sum().backward()
    gradients = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    return values.detach(), gradients, widths.found


def check(model, run, positions, *, tolerance=1e-12, gradient_tolerance=1e-10, runs=1):
    """Equal values and gradients; the feed-forward saw `positions` rows in each of its `runs`, and more otherwise."""
    values, gradients, widths = found(model, run, whole=False)
    expected, wanted, all_rows = found(model, run, whole=True)
    assert widths == [positions] * runs
    assert min(all_rows) > positions
    torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance)
    for name, gradient in wanted.items():
        if gradient is None or gradients[name] is None:
            assert gradient is gradients[name], name
            continue
        size = gradient.abs().max().clamp(min=1e-3)
        assert (gradients[name] - gradient).abs().max() <= gradient_tolerance * size, name


def tolerances(architecture):
    if architecture in MIXTURES_OF_EXPERTS:
        return {"tolerance": 2e-5, "gradient_tolerance": 1e-4}
    return {"gradient_tolerance": 1e-10 if architecture in ALL_FLOAT64 else 1e-5}


@pytest.mark.parametrize("layout", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_log_probs_and_gradients_of_each_architecture(shape, layout):
    architecture = shape.split(",")[0]
    dtype = torch.float32 if architecture in MIXTURES_OF_EXPERTS else torch.float64
    model, batch = tiny_model(architecture, dtype=dtype, **SHAPES[shape]), BATCHES[layout]()
    positions = {"trees": 10, "rows": 5}[layout]  # the first tokens of two branches share theirs

    def run(model):
        return Scorer(model, flat=None if layout == "trees" else False).score(model, batch).logps

    check(model, run, positions, **tolerances(architecture))


@pytest.mark.parametrize("layout", BATCHES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "olmo2", "gpt_neox"])
def test_rewards_need_the_ends_of_sequences_alone(architecture, layout):
    model, batch = tiny_classifier(architecture, dtype=torch.float64), BATCHES[layout]()

    def run(model):
        return ClassificationScorer(model, flat=None if layout == "trees" else False).score(model, batch)

    check(model, run, {"trees": 4, "rows": 3}[layout], **tolerances(architecture))


def test_values_and_labelled_tokens():
    causal = AutoModelForCausalLMWithValueHead(tiny_model("gpt2", dtype=torch.float64)).eval()
    check(causal.pretrained_model, lambda model: _values(causal, model), 10)
    classifier = tiny_classifier("gpt2", of_tokens=True, dtype=torch.float64)
    batch = rows()
    labels = torch.where(batch["labels"] == -100, -100, batch["labels"] % 3)

    def run(model):
        return ClassificationScorer(model).score_tokens(model, {**batch, "labels": labels})[0]

    check(classifier, run, 5)


def _values(wrapper, model):
    wrapper = copy.copy(wrapper)
    wrapper._modules = {**wrapper._modules, "pretrained_model": model}
    return ValueScorer(wrapper).score(wrapper, trees()).values.double()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layout", BATCHES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradient_checkpointing_runs_the_layer_again_at_the_same_positions(architecture, layout, reentrant):
    model, batch = tiny_model(architecture, dtype=torch.float64).train(), BATCHES[layout]()
    positions = {"trees": 10, "rows": 5}[layout]

    def run(model):
        enable_gradient_checkpointing(model, {"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        scored = Scorer(model, flat=None if layout == "trees" else False).score(model, batch)
        assert causal_core(model).is_gradient_checkpointing
        return scored.logps

    check(model, run, positions, runs=2, **tolerances(architecture))
    # The gradients are those without checkpoints, and the model is left as it was.
    _, again, _ = found(model, run, whole=False)
    _, plain, _ = found(model, lambda model: Scorer(model).score(model, batch).logps, whole=False)
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-6, atol=1e-8, msg=name)
    enable_gradient_checkpointing(model, None)
    before = model.base_model.__dict__, [dict(module.__dict__) for module in model.modules()]
    Scorer(model).score(model, batch)
    assert before == (model.base_model.__dict__, [dict(module.__dict__) for module in model.modules()])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_in_every_product(checkpointing):
    config = LoraConfig(
        r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    model = get_peft_model(tiny_model("llama", dtype=torch.float64), config).double().train()

    def run(model):
        if checkpointing:
            enable_gradient_checkpointing(causal_core(model), None)
        return Scorer(model).score(model, trees()).logps

    check(model, run, 10, runs=1 + checkpointing, **tolerances("llama"))


def widths(model, batch=None, options=None, **given):
    """Rows that the last feed-forward is given when the trees are scored."""
    seen = Widths(last_modules(model))
    Scorer(model, **given).score(model, batch or trees(), options)
    assert len(seen.found) == 1
    return seen.found[0]


def test_dropout_falls_on_the_rows_on_which_it_fell():
    """Where noise is on behind the attention the layer stays whole; noise before it has all rows in either case."""
    assert widths(tiny_model("gpt2", resid_pdrop=0.1).train()) == 21
    assert widths(tiny_model("gpt2", resid_pdrop=0.1)) == 10
    assert widths(tiny_model("opt", activation_dropout=0.1, dropout=0.1).train()) == 21
    of_inputs = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
    of_mlp = LoraConfig(r=2, target_modules=["up_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
    assert widths(get_peft_model(tiny_model("llama"), of_mlp).train()) == 21
    model = get_peft_model(tiny_model("llama", attention_dropout=0.5, dtype=torch.float64), of_inputs)
    model = model.double().train()

    def run(model):
        torch.manual_seed(0)
        return Scorer(model).score(model, trees()).logps

    check(model, run, 10, **tolerances("llama"))


def test_all_positions_where_all_are_read():
    """For entropies of all tokens and a router's loss; where nearly all are scored there is nothing to gain."""
    entropy = ScoreOptions(entropy="all")
    model = tiny_model("llama", dtype=torch.float64)
    assert widths(model, options=entropy) == 21
    assert widths(model, options=ScoreOptions(entropy="scored")) == 10
    assert widths(tiny_model("mixtral", output_router_logits=True)) == 21
    everything = {**rows(), "labels": rows()["input_ids"].masked_fill(rows()["attention_mask"] == 0, -100)}
    long = {name: value[:1].repeat(1, 3) for name, value in everything.items()}  # 26 of 27 tokens are scored
    assert widths(model, long) == 27
    nothing = {**rows(), "labels": torch.full((3, 9), -100)}
    assert widths(model, nothing) == 16


def test_models_that_are_not_known_are_left_alone():
    assert widths(tiny_model("bloom"), rows()) == 27
    quantized = tiny_model("llama")
    quantized.is_quantized = True
    assert widths(quantized) == 21
    compiled = tiny_model("llama")
    compiled.model.layers[-1].mlp._compiled_call_impl = compiled.model.layers[-1].mlp._call_impl
    assert widths(compiled) == 21
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=2, task_type="CAUSAL_LM"))
    adapted.peft_config["default"].alora_invocation_tokens = [5]
    assert widths(adapted) == 21


def of_its_own(module, **children):
    """Let a module run code of its own that calls its children by other names."""
    for name, other in children.items():
        module.add_module(other, module._modules.pop(name))

    class OfItsOwn(type(module)):
        def forward(self, *args, **kwargs):
            vars(self).update({name: getattr(self, other) for name, other in children.items()})
            return super().forward(*args, **kwargs)

    module.__class__ = OfItsOwn


def test_layers_of_other_code_or_at_two_places_are_left_alone():
    """Each gave other log-probs or an error before it was looked at."""
    same_layer, same_norm, named, blocks, compiled = (
        tiny_model("llama", dtype=torch.float64) for _ in range(5)
    )
    same_layer.model.layers[0] = same_layer.model.layers[1]
    same_norm.model.norm = same_norm.model.layers[1].post_attention_layernorm
    of_its_own(named.model.layers[1], input_layernorm="first_norm")
    of_its_own(blocks.model, layers="blocks")
    compiled.model.compile(backend="eager")
    for model in (same_layer, same_norm, named, blocks, compiled):
        assert last_layer._LastLayer.of(model) is None
    norm = named.model.layers[1].first_norm
    given = Widths(norm)
    Scorer(named).score(named, trees())
    assert given.found == [21]


def test_states_at_other_positions_are_zeros_and_the_model_is_itself_afterwards():
    model = tiny_model("qwen3", dtype=torch.float64)
    ids = torch.randint(3, 60, (2, 5))
    whole = model.model(ids).last_hidden_state
    with last_layer_at(model, torch.tensor([7, 2, 7]), ids.shape):
        some = model.model(ids).last_hidden_state
        other = model.model(
            ids[:, :3]
        ).last_hidden_state  # another shape: not the batch that the positions are of
    read = torch.zeros(2, 5, dtype=torch.bool)
    read[0, 2] = read[1, 2] = True
    torch.testing.assert_close(some[read], whole[read], rtol=1e-12, atol=1e-12)
    assert not some[~read].any()
    assert torch.equal(other, model.model(ids[:, :3]).last_hidden_state)
    assert torch.equal(whole, model.model(ids).last_hidden_state)


def test_no_gradient_reaches_what_is_not_read():
    """A query that nobody reads may be anything: its own weights learn from the others alone."""
    model = tiny_model("llama", dtype=torch.float64)
    ids = torch.randint(3, 60, (1, 6))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with last_layer_at(model, torch.tensor([2]), ids.shape):
        model.model(inputs_embeds=embedded).last_hidden_state.sum().backward()
    assert embedded.grad[0, :3].abs().sum(-1).gt(0).all()
    assert not embedded.grad[0, 3:].any()
