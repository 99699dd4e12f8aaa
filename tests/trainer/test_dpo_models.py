"""DPO on encoder-decoders, vision-language models and mixtures of experts: plain losses, and the same however it is cut."""

import functools

import pytest
import torch
from datasets import Dataset
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.collators.test_vision_pairs import ASK, BLUE, GREY, pair
from tests.tiny import tiny_model, tiny_seq2seq
from tests.tiny_vision import tiny_processor, tiny_vision_model
from tests.trainer import dpo_plain
from tests.trainer.dpo_runs import make
from tests.trainer.one_step import assert_same_gradient
from tests.trainer.resume_worker import tokenizer
from tests.trainer.test_dpo_trainer import ROWS, assert_gradients

BETA = 0.3


def perturbed(model, size=0.1):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(size * noise.to(parameter.dtype))
    return model


def step(**settings):
    trainer = make(beta=BETA, **settings)
    trainer.train()
    return trainer.keep.steps[0], trainer.state.log_history[0]


# ---- encoder-decoders


def t5(architecture="t5"):
    policy = tiny_seq2seq(architecture, dtype=torch.float64)
    return policy, perturbed(tiny_seq2seq(architecture, dtype=torch.float64))


@functools.cache
def t5_step(architecture, **settings):
    policy, reference = t5(architecture)
    return step(model=policy, ref_model=reference, **settings)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_an_encoder_decoders_loss_is_that_of_plain_torch(name, architecture):
    policy, reference = t5(architecture)
    options = {"of": dpo_plain.decoder_logps, "mean": name == "ipo"}
    scores = dpo_plain.pairs(policy, reference, ROWS, **options)
    loss = dpo_plain.LOSSES[name](scores, BETA).mean()
    gradients, log = t5_step(architecture, loss_type=name)
    assert log["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert log["logps/rejected"] == pytest.approx(float(scores[1].mean().detach()), rel=1e-10)
    # T5 computes its softmax and its norms in float32, whatever the weights are
    assert_gradients(gradients, loss, policy, tolerance=1e-10 if architecture == "bart" else 1e-7)


def test_text_for_an_encoder_decoder(capsys):
    policy, reference = t5()
    words = tokenizer()
    words.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    rows = [{"prompt": "w5 w6", "chosen": "w7 w8 w9", "rejected": "w4"}] * 8
    trainer = make(
        model=policy, ref_model=reference, train_dataset=Dataset.from_list(rows), max_completion_length=3,
        eval_dataset=Dataset.from_list(rows[:2]), generate_during_eval=True, max_length=12,
        processing_class=words,
    )  # fmt: skip
    assert trainer.train_dataset[0] == {
        "prompt_input_ids": [5, 6, 1],
        "chosen_input_ids": [7, 8, 9],
        "rejected_input_ids": [4, 1],
    }
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert "w5 w6 <eos>" in capsys.readouterr().out


# ---- images

FAMILIES = ("llava", "idefics3", "qwen2_vl")
CAT = {"role": "assistant", "content": "A cat, I think."}
IMAGES = [
    pair([0]),
    pair([3], prompt=[{**ASK, "content": "And then?"}], chosen=[CAT]),
    pair([1, 2], rejected=[CAT]),
    pair([4], chosen=[GREY], rejected=[BLUE]),
]


@functools.cache
def processor_of(family):
    return tiny_processor(family)


def image_step(family="llava", rows=IMAGES, dtype=torch.float64, **settings):
    processor = processor_of(family)
    policy = tiny_vision_model(processor, family, dtype=dtype)
    reference = perturbed(tiny_vision_model(processor, family, dtype=dtype))
    settings = {"per_device_train_batch_size": 4, "max_length": None, "max_prompt_length": None, **settings}
    data = Dataset.from_list(rows)
    return step(model=policy, ref_model=reference, processing_class=processor, train_dataset=data, **settings)


def plain_images(model, processor, row, side):
    """Log-prob of a completion: the processor called by hand on the rendered conversation, one row at a time."""
    images = row["images"]
    place = [{"type": "image"}] * len(images)
    prompt = [{"role": "user", "content": [*place, {"type": "text", "text": row["prompt"][0]["content"]}]}]
    head = processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    whole = processor.apply_chat_template([*prompt, *row[side]], tokenize=False)
    tail = processor.tokenizer(whole[len(head) :], add_special_tokens=False)["input_ids"]
    inputs = processor(text=[whole], images=[images], return_tensors="pt", add_special_tokens=False)
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    logits = model(**inputs).logits[0, -len(tail) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tail)[:, None]).sum()


@pytest.mark.parametrize("family", ["llava", "idefics3"])
def test_a_step_with_images_is_that_of_plain_torch(family):
    processor = processor_of(family)
    policy = tiny_vision_model(processor, family, dtype=torch.float64)
    reference = perturbed(tiny_vision_model(processor, family, dtype=torch.float64))

    def sides(model):
        return [
            torch.stack([plain_images(model, processor, row, side) for row in IMAGES])
            for side in ("chosen", "rejected")
        ]

    with torch.no_grad():
        ref = sides(reference)
    scores = (*sides(policy), *ref)
    gradients, log = image_step(family)
    assert log["logps/chosen"] == pytest.approx(float(scores[0].mean().detach()), rel=1e-9)
    assert log["rewards/rejected"] == pytest.approx(float(BETA * (scores[1] - scores[3]).mean().detach()), rel=1e-8)
    loss = dpo_plain.LOSSES["sigmoid"](scores, BETA).mean()
    plain = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
    expected = {n: g for (n, _), g in zip(policy.named_parameters(), plain, strict=True) if g is not None}
    size = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-8 * size, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_with_images_does_not_depend_on_the_split(family):
    whole = image_step(family)
    cut = image_step(family, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert_same_gradient(cut[0], whole[0], tolerance=1e-9)
    for name in ("rewards/margins", "logps/chosen", "logits/rejected"):
        assert cut[1][name] == pytest.approx(whole[1][name], rel=1e-9), name


# ---- mixtures of experts


@pytest.mark.parametrize("sharing", [True, False])
def test_the_routers_loss_is_added(sharing):
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    rows = Dataset.from_list(ROWS)

    def run(**more):
        model = tiny_model("mixtral", **more)
        reference = perturbed(tiny_model("mixtral"))
        return step(model=model, ref_model=reference, train_dataset=rows, prefix_sharing=sharing)[1]

    plain, routed = run(), run(**options)
    assert routed["loss"] == pytest.approx(plain["loss"] + 0.1 * routed["aux_loss"], rel=1e-5)
    assert "aux_loss" not in plain
    model = tiny_model("mixtral", **options)
    sequences = [
        [*row["prompt_input_ids"], *row[f"{side}_input_ids"]] for row in ROWS for side in ("chosen", "rejected")
    ]
    width = max(map(len, sequences))
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).aux_loss
    assert routed["aux_loss"] == pytest.approx(float(expected), rel=1e-5)
