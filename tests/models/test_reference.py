"""Every kind of reference answers alike: without gradient, without dropout, and the policy is left as it was."""

import copy
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.models.reference_worker import BATCH, logps, train
from tests.tiny import tiny_model
from tests.trainer.sharded_worker import KINDS
from tests.two_processes import launch, need_deepspeed
from trl.models.reference import (
    _SETTINGS,
    REFERENCE_FILE,
    AdapterReference,
    FrozenModel,
    InitialPolicy,
    choose_adapters,
    make_reference,
)
from trl.models.scoring.causal import Scorer


def base(seed=0, **overrides):
    return tiny_model("gpt2", dtype=torch.float64, seed=seed, **{"resid_pdrop": 0.5, "attn_pdrop": 0.5, **overrides})


def plain_logps(model):
    return logps(Scorer(model), model.eval(), BATCH).detach()


def adapted(*names, **options):
    """A GPT-2 with LoRA adapters of these names, filled with numbers of their own; the first one is active."""
    settings = {"r": 2, "target_modules": ["c_attn"], "lora_dropout": 0.5, "fan_in_fan_out": True, **options}
    torch.manual_seed(3)
    model = peft.get_peft_model(base(), peft.LoraConfig(**settings), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if any(f".{adapter}." in name for adapter in names):
            parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 2)
    return model


def reference_of(policy, **options):
    return make_reference(policy, Scorer(policy), options.pop("ref_model", None), **options)


def kinds():
    """(name, policy, reference, what it must answer) of every kind."""
    plain = base()
    yield "copy", plain, reference_of(plain), plain_logps(base())
    plain = base()
    yield "given", plain, reference_of(plain, ref_model=base(seed=1)), plain_logps(base(seed=1))
    plain = base()
    yield "initial", plain, reference_of(plain, precompute_ref_log_probs=True), plain_logps(base())
    policy = adapted("default")
    yield "disabled", policy, reference_of(policy), plain_logps(base())
    policy = adapted("default", modules_to_save=["lm_head"])
    yield "saved", policy, reference_of(policy), plain_logps(base())
    policy = adapted("learner", "held")
    other = adapted("learner", "held")
    other.set_adapter("held")
    yield "named", policy, reference_of(policy, ref_adapter_name="held"), plain_logps(other)


NAMES = ["copy", "given", "initial", "disabled", "saved", "named"]


@pytest.fixture(params=NAMES)
def kind(request):
    return next(found[1:] for found in kinds() if found[0] == request.param)


def test_it_gives_the_references_log_probs(kind):
    policy, reference, expected = kind
    found = reference.score(policy.train(), BATCH, logps)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(reference.score(nn.Sequential(policy)[0], BATCH, logps), found, atol=0, rtol=0)


def test_the_policy_is_left_as_it_was(kind):
    policy, reference, _ = kind
    policy.train()
    next(policy.children()).eval()  # a mixture of modes, and a frozen weight where PEFT would train
    trained = [p for p in policy.parameters() if p.requires_grad]
    trained[0].requires_grad_(False)
    state = torch.get_rng_state()
    before = (
        {name: p.requires_grad for name, p in policy.named_parameters()},
        [module.training for module in policy.modules()],
        {name: value.clone() for name, value in policy.state_dict().items()},
    )
    reference.score(policy, BATCH, logps)
    with pytest.raises(RuntimeError, match="inside"):
        reference.score(policy, BATCH, _raise)
    assert {name: p.requires_grad for name, p in policy.named_parameters()} == before[0]
    assert [module.training for module in policy.modules()] == before[1]
    assert all(torch.equal(value, policy.state_dict()[name]) for name, value in before[2].items())
    assert torch.equal(torch.get_rng_state(), state)
    if isinstance(policy, peft.PeftModel):
        assert policy.active_adapter in ("default", "learner")
        assert policy.get_model_status().enabled is True


def _raise(scorer, model, batch):
    raise RuntimeError("inside")


def test_the_policys_gradient_does_not_see_it(kind):
    """A reference asked between forward and backward changes nothing, and gives no gradient of its own."""
    policy, reference, _ = kind
    policy.eval()
    scorer = Scorer(policy)
    gradients = []
    for asked in (False, True):
        policy.zero_grad()
        loss = scorer.score(policy, BATCH).logps.sum()
        if asked:
            reference.score(policy, BATCH, logps)
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() != set()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("name", ["disabled", "named"])
def test_requires_grad_is_the_policys_inside_too(name):
    """FSDP2 takes requires_grad over when it first gathers a weight, which may be in the reference's forward."""
    policy, reference = next(found[1:3] for found in kinds() if found[0] == name)
    outside = [p.requires_grad for p in policy.parameters()]

    def inside(scorer, model, batch):
        return [p.requires_grad for p in model.parameters()]

    assert reference.score(policy, BATCH, inside) == outside
    assert any(outside)


def test_a_copy_does_not_move_with_the_policy():
    policy = base()
    reference = reference_of(policy)
    before = reference.score(policy, BATCH, logps)
    for parameter in policy.parameters():
        parameter.data.mul_(1.5)
    assert torch.equal(reference.score(policy, BATCH, logps), before)
    assert not any(p.requires_grad for p in reference.module.parameters())
    assert all(p.requires_grad for p in policy.parameters())


def test_prompt_tuning_is_switched_off():
    policy = peft.get_peft_model(base(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    reference = reference_of(policy)
    assert isinstance(reference, AdapterReference)
    found = reference.score(policy.train(), BATCH, logps)
    torch.testing.assert_close(found, plain_logps(base()), atol=1e-12, rtol=0)


# ---- what is chosen


def test_the_kinds_that_are_chosen(tmp_path):
    assert isinstance(reference_of(base()), FrozenModel)
    assert isinstance(reference_of(base(), precompute_ref_log_probs=True), InitialPolicy)
    assert reference_of(adapted("default")).adapter is None
    assert reference_of(adapted("default"), precompute_ref_log_probs=True).adapter is None
    assert reference_of(adapted("a", "b"), ref_adapter_name="b").adapter == "b"
    given = base(seed=1)
    for forced in ({"force_use_ref_model": True}, {}):
        separate = reference_of(adapted("default"), ref_model=given, **forced)
        assert isinstance(separate, FrozenModel) and separate.module is given
    given.save_pretrained(tmp_path)
    loaded = reference_of(base(), ref_model=str(tmp_path), ref_model_init_kwargs={"dtype": "bfloat16"})
    assert isinstance(loaded, FrozenModel)
    assert loaded.module.dtype == torch.bfloat16
    # A reference from the policy's own file has the policy's dtype, unless its settings say otherwise, under either name.
    for name in ("dtype", "torch_dtype"):
        loaded = reference_of(
            base(), ref_model=str(tmp_path), path=str(tmp_path), ref_model_init_kwargs={name: "bfloat16"}
        )
        assert isinstance(loaded, FrozenModel) and loaded.module.dtype == torch.bfloat16


def test_model_adapter_name_becomes_the_one_that_trains():
    policy = adapted("first", "second")
    reference = reference_of(policy, model_adapter_name="second", ref_adapter_name="first")
    reference.score(policy, BATCH, logps)
    assert policy.active_adapter == "second"
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained
    assert all(".second." in name for name in trained)


def test_a_reference_adapter_that_was_loaded_to_train_is_frozen():
    policy = adapted("learner", "held")
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(".held." in name or ".learner." in name)
    reference_of(policy, ref_adapter_name="held")
    assert not any(p.requires_grad for name, p in policy.named_parameters() if ".held." in name)


def shared_weights():
    policy = base()
    return policy, {"ref_model": policy}


def injected_base():
    """PEFT works in place: what was the base is the policy now."""
    model = base()
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"])), {
        "ref_model": model,
        "force_use_ref_model": True,
    }


BAD = {
    "same": (shared_weights, r"share weights.*frozen copy"),
    "same_base": (injected_base, "share weights"),
    "vocabulary": (lambda: (base(), {"ref_model": base(vocab_size=64)}), r"vocabulary of 64 tokens.*of 96.*same family"),
    "peft": (lambda: (adapted("default"), {"ref_model": base(), "force_use_ref_model": False}), "force_use_ref_model=True"),
    "unknown": (lambda: (adapted("a", "b"), {"ref_adapter_name": "c"}), r"ref_adapter_name='c'.*\['a', 'b'\]"),
    "unknown_model": (lambda: (adapted("a"), {"model_adapter_name": "c"}), r"model_adapter_name='c'"),
    "twice": (lambda: (adapted("a"), {"ref_adapter_name": "a"}), "another adapter than the one that trains"),
    "no_adapters": (lambda: (base(), {"ref_adapter_name": "a"}), "ref_adapter_name='a'"),
    "init_kwargs": (lambda: (base(), {"ref_model_init_kwargs": {"dtype": "auto"}}), "no ref_model"),
    "init_kwargs_loaded": (
        lambda: (base(), {"ref_model": base(seed=1), "ref_model_init_kwargs": {"dtype": "auto"}}),
        "loaded already",
    ),
    "two": (
        lambda: (adapted("a", "b"), {"ref_adapter_name": "b", "ref_model": base(), "force_use_ref_model": True}),
        "ref_adapter_name='b' cannot be combined",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_settings_that_cannot_work(case):
    make, message = BAD[case]
    policy, options = make()
    with pytest.raises(ValueError, match=message):
        reference_of(policy, **options)


@pytest.mark.parametrize("case", ["unknown_model", "init_kwargs"])
def test_a_policy_held_against_nothing_takes_the_same_settings(case):
    make, message = BAD[case]
    policy, options = make()
    with pytest.raises(ValueError, match=message):
        choose_adapters(policy, SimpleNamespace(**dict.fromkeys(_SETTINGS) | options))


def test_what_is_no_model():
    with pytest.raises(FileNotFoundError, match="no folder"):
        reference_of(base(), ref_model="./nowhere")
    with pytest.raises(TypeError, match="PreTrainedModel"):
        reference_of(base(), ref_model=nn.Linear(1, 1))


def test_a_sharded_policy_is_loaded_again_and_never_copied(tmp_path):
    policy = base()
    policy.save_pretrained(tmp_path)
    next(policy.parameters()).ds_id = 0  # what ZeRO-3 marks its shards with
    with pytest.raises(ValueError, match="Pass ref_model, or model as a name"):
        reference_of(policy)
    reference = reference_of(policy, path=str(tmp_path), model_init_kwargs={"dtype": "float64"})
    assert torch.equal(reference.score(policy, BATCH, logps), plain_logps(base()))


def test_an_adapter_cannot_be_asked_before_it_is_gathered(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert isinstance(reference_of(base(), precompute_ref_log_probs=True), FrozenModel)
    with pytest.raises(ValueError, match=r"precompute_ref_log_probs=True.*ZeRO-3 or FSDP.*False"):
        reference_of(adapted("default"), precompute_ref_log_probs=True)


# ---- fingerprints and files


def changed(model, part):
    """The model with the first parameter that has `part` in its name moved by one bit."""
    parameter = next(p for name, p in model.named_parameters() if part in name)
    with torch.no_grad():
        parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(9.0, dtype=parameter.dtype))
    return model


def test_a_fingerprint_sees_one_bit_of_one_weight():
    print_of = lambda model: FrozenModel(model, None).fingerprint(model)  # noqa: E731
    assert print_of(base()) == print_of(base())
    assert print_of(base()) == InitialPolicy(base(), None).fingerprint(base())
    assert print_of(base()) == reference_of(base()).fingerprint(base())  # the attention of the scoring forward
    others = [
        base(seed=1),
        base().float(),
        base(n_head=2),
        changed(base(), "ln_f"),
        base(layer_norm_epsilon=1e-4),
    ]
    assert len({print_of(model) for model in [base(), *others]}) == 1 + len(others)


def test_an_adapter_that_is_switched_off_has_no_part_in_the_fingerprint():
    def print_of(model):
        return AdapterReference(None).fingerprint(nn.Sequential(model))

    for options in (
        {},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"trainable_token_indices": [3]},
    ):
        first = adapted("default", **options)
        for part in (".default", "lora_A"):
            moved = changed(adapted("default", **options), part)
            assert print_of(first) == print_of(moved), (options, part)
        assert print_of(first) != print_of(changed(adapted("default", **options), "ln_f"))


def test_a_named_adapters_weights_and_settings_count():
    reference = AdapterReference(None, "held", "learner")
    first = reference.fingerprint(adapted("learner", "held"))
    assert first == reference.fingerprint(changed(adapted("learner", "held"), ".learner."))
    assert first != reference.fingerprint(changed(adapted("learner", "held"), ".held."))
    assert first != reference.fingerprint(adapted("learner", "held", lora_alpha=3))


def test_weights_come_back_bit_for_bit(tmp_path):
    reference = FrozenModel(base(seed=1), None)
    reference.save(tmp_path)
    other = FrozenModel(base(), None)
    other.load(tmp_path)
    pairs = zip(reference.module.parameters(), other.module.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert [path.name for path in tmp_path.iterdir()] == [REFERENCE_FILE]


def test_files_of_other_models_and_missing_ones(tmp_path, caplog):
    reference = FrozenModel(base(), None)
    kept = copy.deepcopy(reference.module.state_dict())
    reference.load(tmp_path)
    assert "is missing: the reference restarts" in caplog.text
    FrozenModel(base(vocab_size=64), None).save(tmp_path)
    with pytest.raises(ValueError, match=r"wte\.weight"):
        reference.load(tmp_path)
    FrozenModel(base(n_layer=1), None).save(tmp_path)
    with pytest.raises(ValueError, match=r"different are .*h\.1\."):
        reference.load(tmp_path)
    assert all(torch.equal(value, kept[name]) for name, value in reference.module.state_dict().items())


# ---- two processes with sharded weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process with whole weights sees, and the adapter of a run in which no reference was asked."""
    seen, trainer = train(str(tmp_path_factory.mktemp("whole")), rows=4)
    _, alone = train(str(tmp_path_factory.mktemp("alone")), rows=4, ask=False)
    states = [peft.get_peft_model_state_dict(run.model) for run in (trainer, alone)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return seen, states[0]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", KINDS)
def test_sharded_references(how, whole, tmp_path):
    need_deepspeed(how)
    launch("tests.models.reference_worker", str(tmp_path), how)
    seen, (expected, adapter) = torch.load(tmp_path / "seen.pt"), whole
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, str):
            assert seen[name] == value, name
        else:
            torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert torch.equal(seen["disabled_0"], seen["disabled_2"])
    assert torch.equal(seen["frozen_0"], seen["frozen_2"])
    assert not torch.allclose(seen["moved"], seen["frozen_0"])
    found = load_file(tmp_path / "adapter_model.safetensors")
    for name, weight in found.items():
        torch.testing.assert_close(weight, adapter[name], rtol=1e-4, atol=1e-4, msg=name)
    if how == "zero3":  # `prepare_deepspeed` of `trl.trainer.utils`
        asked = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
        logits = tiny_model("llama", seed=2).eval()(**asked).logits
        for rank in (0, 1):
            torch.testing.assert_close(torch.load(tmp_path / f"by_hand_{rank}.pt"), logits, rtol=1e-5, atol=1e-5)
