"""GOLD: spans of two tokenizers' tokens, the loss over them, completions of both sides, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from tests.contracts.methods import gkd
from tests.data.test_byte_alignment import KINDS, texts, tokenizer_of
from tests.experimental.gold_runs import ANSWERS, ROWS, gold, other_tokenizer
from tests.generation.served_runs import asks
from tests.generation.stand_in import TOKEN, LocalCopy, StandIn, serving
from tests.ports import free_port
from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.resume_worker import tokenizer
from trl import GKDTrainer, SFTTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.gold.gold_data import Pairing
from trl.experimental.gold.gold_method import Spans, chunks_of_spans
from trl.experimental.gold.gold_trainer import (
    GOLDVLLMSyncCallback,
    ULDLoss,
    build_teacher_inputs_from_texts,
    print_prompt_completions_sample_uld,
)
from trl.objectives.cross_vocabulary import span_measures

HYBRID = {"uld_use_hybrid_loss": True}
WITH_END = {"uld_skip_student_eos": False, "uld_skip_teacher_eos": False}


def spans_of(row: dict[str, Any], tokenizers: tuple[Any, Any]) -> list[tuple[str, str]]:
    """The texts of each span on both sides."""
    found = []
    for number in range(1, max(row["spans"]) + 1):
        pair = []
        for reader, side in zip(tokenizers, ("", "teacher_"), strict=True):
            ids, spans = row[f"{side}input_ids"], row[f"{side}spans"]
            pair.append(reader.decode([t for t, span in zip(ids, spans, strict=True) if span == number]))
        found.append(tuple(pair))
    return found


def test_spans_are_the_answer_under_both_templates() -> None:
    trainer = gold()
    tokenizers = trainer.processing_class, trainer.teacher_tokenizer
    for row, answer in zip(trainer.train_dataset, ANSWERS, strict=True):
        found = spans_of(row, tokenizers)
        assert [own.encode() for own, _ in found] == [other.encode() for _, other in found]
        text = "".join(own for own, _ in found)
        if "�" not in text:
            # "] The" is a token of the teacher: what it reaches over is in no span.
            assert answer.endswith(text) and len(text) >= len(answer) - len("And then")
    assert all(GOLDTrainer in type(trainer).__mro__ and isinstance(trainer, kind) for kind in (GKDTrainer, SFTTrainer))


def test_end_tokens_are_a_span_unless_one_side_skips_them() -> None:
    for settings, ends in ((WITH_END, True), ({}, False), ({"uld_skip_student_eos": False}, False)):
        trainer = gold(**settings)
        row = trainer.train_dataset[1]
        last = spans_of(row, (trainer.processing_class, trainer.teacher_tokenizer))[-1]
        assert (last == ("<|im_end|>", "</s>")) == ends


def reference_loss(trainer: Any, row: dict[str, Any], *, hybrid: bool, beta: float = 0.5) -> tuple[list[Any], ...]:
    """The distances of a row's spans, from both models' own logits, span by span."""
    sides = []
    for model, side in ((trainer.model, ""), (trainer.teacher.model, "teacher_")):
        ids, spans = row[f"{side}input_ids"], row[f"{side}spans"]
        with torch.no_grad():
            probabilities = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        measures = []
        for number in range(1, max(spans) + 1):
            places = [place for place, span in enumerate(spans) if span == number]
            measure = probabilities[places[0] - 1].clone()
            for place in places[1:]:
                measure *= probabilities[place - 1, ids[place]]
            measures.append(measure)
        sides.append(measures)
    own, other = trainer.pairing.known
    pairs = [(own.index(token), other.index(token)) for token in sorted({*own} & {*other}) if token]
    matched, rest = [], []
    for p, q in zip(*sides, strict=True):
        a, b = (x[list(ids)] for x, ids in zip((p, q), zip(*pairs, strict=True), strict=True))
        mix = beta * b + (1 - beta) * a
        matched.append((beta * b * (b / mix).log() + (1 - beta) * a * (a / mix).log()).sum().item())
        left = (
            [
                [x[n].item() for n in range(len(x)) if n not in ids]
                for x, ids in zip((p, q), map(set, zip(*pairs, strict=True)), strict=True)
            ]
            if hybrid
            else [p.tolist(), q.tolist()]
        )
        p_sorted, q_sorted = (sorted(x, reverse=True) for x in left)
        size = max(len(p_sorted), len(q_sorted))
        p_sorted, q_sorted = (x + [0.0] * (size - len(x)) for x in (p_sorted, q_sorted))
        rest.append(sum(abs(x - y) for x, y in zip(p_sorted, q_sorted, strict=True)))
    return matched, rest


def test_the_loss_is_the_mean_over_spans() -> None:
    plain, hybrid = gold(), gold(**HYBRID, uld_hybrid_matched_weight=0.7, uld_hybrid_unmatched_weight=0.2)
    rests = [x for row in plain.train_dataset for x in reference_loss(plain, row, hybrid=False)[1]]
    parts = [reference_loss(hybrid, row, hybrid=True) for row in hybrid.train_dataset]
    matched, unmatched = (np.mean([x for part in parts for x in part[n]]) for n in (0, 1))
    for trainer, expected in ((plain, np.mean(rests)), (hybrid, 0.7 * matched + 0.2 * unmatched)):
        trainer.train()
        log = trainer.state.log_history[0]
        assert log["off_policy_loss"] == pytest.approx(expected, rel=1e-10)
        assert log["loss"] == pytest.approx(expected, rel=1e-6)  # logged in float32
    assert log["matched_loss"] == pytest.approx(matched, rel=1e-10)
    assert log["unmatched_loss"] == pytest.approx(unmatched, rel=1e-10)
    assert hybrid.teacher.model.get_input_embeddings().weight.grad is None


def test_the_default_weights_are_the_share_of_the_teachers_tokens() -> None:
    trainer = gold(**HYBRID)
    own, other = ({*known} for known in trainer.pairing.known)
    share = len(own & other) / len(other)
    assert 0.5 < share < 1 and trainer.method.weights == pytest.approx((share, 1 - share))


def test_the_cross_entropy_is_the_mean_over_the_tokens_of_completions() -> None:
    trainer = gold(uld_crossentropy_weight=0.5, uld_distillation_weight=0.0)
    losses = []
    for row in trainer.train_dataset:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logps = trainer.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        own = logps.gather(1, ids[0, 1:, None])[:, 0]
        losses += own[torch.tensor(row["completion_mask"][1:]) == 1].tolist()
    evaluated = trainer.evaluate(Dataset.from_list(ROWS))["eval_loss"]
    trainer.train()
    assert evaluated == pytest.approx(-0.5 * np.mean(losses), rel=1e-10)
    assert trainer.state.log_history[-2]["loss"] == pytest.approx(-0.5 * np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_with_one_tokenizer_it_is_gkd(beta: float) -> None:
    teacher = tiny_model("llama", vocab_size=400, dtype=torch.float64, seed=1)
    settings = {"tokenizer": "chatml", "teacher_model": teacher, "beta": beta, **WITH_END, **HYBRID}
    trainers = [gold(**settings), gold(**settings, use_uld_loss=False, temperature=1.0)]
    for trainer in trainers:
        trainer.train()
    (own,), (other,) = (trainer.keep.steps for trainer in trainers)
    size = max(gradient.abs().max() for gradient in other.values())
    assert all((own[name] - other[name]).abs().max() < 1e-10 * size for name in other)
    losses = [trainer.state.log_history[0]["off_policy_loss"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10) and losses[0] > 0.01


def test_without_uld_it_is_gkd_with_other_sampling() -> None:
    rows = gkd().train_dataset
    model, teacher = (tiny_model(name, dtype=torch.float64) for name in ("gpt2", "llama"))
    settings = {
        "use_uld_loss": False,
        "teacher_model": teacher,
        "train_dataset": rows,
        "processing_class": tokenizer(),
    }
    trainer, expected = gold(model=model, **settings), gkd()
    for each in (trainer, expected):
        each.train()
    (own,), (other,) = trainer.keep.steps, expected.keep.steps
    assert all(torch.equal(own[name], other[name]) for name in other)
    sampling = gold(model=model, **settings, lmbda=1.0, top_k=7)._generated.student.sampling
    assert (sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.95, 7, 6)


@pytest.mark.parametrize("own", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_spans_of_random_tokenizers_add_up_to_both_sequences(own: str, other: str) -> None:
    args = GOLDConfig("out", use_cpu=True, **WITH_END)
    pairing = Pairing.of(tokenizer_of(own), tokenizer_of(other), args)
    draw, generator = random.Random(1), torch.Generator().manual_seed(0)
    for text in draw.sample(texts(), 8):
        ids = [each(text, add_special_tokens=False)["input_ids"] for each in pairing.tokenizers]
        found = pairing.spans(*ids)
        for tokens, spans, known in zip(ids, found[:2], pairing.known, strict=True):
            assert (spans >= 0).all() and found.count == len({*spans.tolist()})
            first = torch.from_numpy(np.diff(spans, prepend=-1) > 0)
            logits = torch.randn(len(tokens), len(known), generator=generator, dtype=torch.float64)
            targets = torch.tensor(tokens)
            merged = span_measures(logits, targets, first, torch.ones_like(first))
            whole = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
            spread = merged.gather(1, targets[first][:, None]).sum()
            assert spread.item() == pytest.approx(whole.item(), rel=1e-12)


def test_chunks_hold_whole_spans() -> None:
    draw = random.Random(0)
    for _ in range(50):
        sides: list[list[tuple[bool, bool]]] = [[], []]
        for _ in range(draw.randint(0, 12)):
            if draw.random() < 0.3:
                sides[0] += [(False, False)] * draw.randint(1, 3)
            else:
                for side in sides:
                    side += [(True, True)] + [(False, True)] * draw.randint(0, 3)
        own, other = (
            Spans(
                torch.zeros(len(side)),
                *(torch.tensor([x[n] for x in side], dtype=torch.bool) for n in (0, 1)),
            )
            for side in sides
        )
        parts = chunks_of_spans(own, other, 4)
        for number, spans in enumerate((own, other)):
            read = [place for part in parts for place in range(part[number].start, part[number].stop)]
            assert read == list(range(len(spans.first)))
        for mine, theirs in parts:
            assert own.first[mine].sum() == other.first[theirs].sum()
            assert not own.inside[mine][:1].any() or own.first[mine][0]
            assert max(mine.stop - mine.start, theirs.stop - theirs.start) <= 4 or own.first[mine].sum() == 1


def rows_of_step(trainer: Any) -> list[tuple[str, str, str, str]]:
    """Prompt and completion of each row of a step, as both sides read them."""
    loader = iter(trainer.get_train_dataloader())
    (batch,), _ = trainer.get_batch_samples(loader, 1, torch.device("cpu"))
    found = []
    for row in range(8):
        found_texts: list[str] = []
        for reader, side in (
            (trainer.processing_class, batch), (trainer.teacher_tokenizer, batch["teacher_batch"])
        ):  # fmt: skip
            real = side["attention_mask"][row] == 1
            trained = side["labels"][row][real] != -100
            found_texts += [reader.decode(side["input_ids"][row][real][own]) for own in (~trained, trained)]
        found.append(tuple(found_texts))
    return found


@pytest.mark.parametrize("settings", [{"lmbda": 1.0}, {"seq_kd": True}])
def test_completions_are_read_by_both_sides(settings: dict[str, Any]) -> None:
    data, made = rows_of_step(gold()), rows_of_step(gold(**settings))
    for given, generated in zip(data, made, strict=True):
        assert given[0] == generated[0] and given[2].rstrip() == generated[2].rstrip()
        own, other = (text.removesuffix(end) for text, end in zip(generated[1::2], ("<|im_end|>", "</s>"), strict=True))
        assert (generated[1] != given[1] and own.startswith(other.rstrip("�"))) or other.startswith(own.rstrip("�"))


@pytest.mark.parametrize("settings", [{"lmbda": 1.0}, {"seq_kd": True}])
def test_completions_have_tokens_of_their_writers_tokenizer(settings: dict[str, Any]) -> None:
    wide = (tiny_model(name, vocab_size=900, dtype=torch.float64) for name in ("gpt2", "llama"))
    trainer = gold(model=next(wide), teacher_model=next(wide), **settings)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_metrics_say_whose_completions_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = gold(lmbda=1.0, max_steps=2, **HYBRID, log_completions=True, num_completions_to_print=2)
    trainer.train()
    assert {"on_policy_loss", "matched_loss", "unmatched_loss"} < set(trainer.state.log_history[0])
    assert "off_policy_loss" not in trainer.state.log_history[0]
    shown = capsys.readouterr().out
    assert "Step 0" in shown and "Step 1" not in shown and shown.count("assistant") == 2


def test_a_student_learns_from_a_teacher_with_another_tokenizer() -> None:
    trainer = gold(
        model=tiny_model("gpt2", vocab_size=400), teacher_model=tiny_model("llama", vocab_size=300, seed=1), **HYBRID, beta=0.0,
        max_steps=60, learning_rate=1e-2, optim="adamw_torch", logging_steps=20,
    )  # fmt: skip
    rows = Dataset.from_list(ROWS)
    before = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(rows)["eval_loss"] < 0.3 * before


def test_rows_that_the_teacher_reads_otherwise_are_not_trained(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    shouts = "{%- for m in messages -%}{{- '[' + m['content'] | upper + ']' -}}{%- endfor -%}"
    other_tokenizer(shouts + "{%- if add_generation_prompt -%}{{- '[' -}}{%- endif -%}").save_pretrained(tmp_path)
    rows = [*ROWS[:1], {**ROWS[0], "completion": [{"role": "assistant", "content": "42"}]}]
    given = {"teacher_tokenizer_name_or_path": str(tmp_path)}
    trainer = gold(**given, train_dataset=Dataset.from_list(rows))
    assert "in 1 of 2 rows (first: [0]) no span" in caplog.text
    assert [max(spans) for spans in trainer.train_dataset["spans"]] == [0, 1]
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    with pytest.raises(ValueError, match="no row has a span"):
        gold(**given, train_dataset=Dataset.from_list(rows[:1]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"uld_student_temperature": 0.0}, "uld_student_temperature must be > 0"),
        ({"uld_distillation_weight": -1.0}, "uld_distillation_weight must be >= 0"),
        ({"uld_distillation_weight": 0.0}, "both 0"),
        ({"uld_hybrid_matched_weight": 0.5}, "set together"),
        ({"max_completion_length": 1024}, "must be below max_length=1024"),
        ({"packing": True}, "does not support packing"),
        ({"assistant_only_loss": True}, "does not support assistant_only_loss"),
        ({"teacher_tokenizer_name_or_path": None}, "Set teacher_tokenizer_name_or_path"),
        ({"teacher_model": None}, "needs a teacher_model"),
        ({"teacher_model": "http://user:SECRET@h/v1"}, "^'http://<REDACTED>@h/v1' is an address"),
        ({"teacher_model": "http://user:SECRET@h/v1", "teacher_tokenizer_name_or_path": None}, "^'http://<REDACTED>@h/v1' is an address"),
        ({"teacher_model": tiny_model("llama", dtype=torch.float64)}, "teacher's tokenizer has 300 tokens, its model 96"),
        ({"data_collator": lambda rows: rows}, "data_collator was given"),
        ({"train_dataset": Dataset.from_list([{"input_ids": [3, 4, 5]}])}, "rows of tokens"),
        ({"lmbda": 1.0, "train_dataset": Dataset.from_list([{"text": "Look up."}] * 8)}, "8 of 8 rows have no prompt"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gold(**settings)


def test_texts_without_prompts_are_aligned_too() -> None:
    trainer = gold(train_dataset=Dataset.from_list([{"text": text} for text in ANSWERS]))
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])
    row = trainer.train_dataset[0]
    assert row["spans"][0] == row["teacher_spans"][0] == 0 and max(row["spans"]) > 3


def test_the_module_of_trl_is_the_trainers_loss() -> None:
    trainer = gold(**HYBRID, uld_crossentropy_weight=0.3)
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(3)])
    theirs = batch["teacher_batch"]
    loss_of = ULDLoss(trainer.args, trainer.processing_class, trainer.teacher_tokenizer)
    logits = [
        model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        for model, rows in ((trainer.model, batch), (trainer.teacher.model, theirs))
    ]
    # Without the texts both sides are aligned from the beginning: those of these rows begin alike.
    found = loss_of(*logits, batch["labels"], theirs["labels"], batch["input_ids"], theirs["input_ids"])
    expected = trainer.evaluate(trainer.train_dataset.select(range(3)))["eval_loss"]
    assert found.item() == pytest.approx(expected, rel=1e-10)
    assert loss_of.crossentropy_weight == 0.3 and loss_of.use_hybrid_loss and loss_of.ignore_index == -100
    found.backward()
    assert trainer.model.lm_head.weight.grad.abs().max() > 0


def test_the_divergence_of_probabilities() -> None:
    p, q = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[0.25, 0.75]]])
    found = GOLDTrainer.generalized_jsd_loss(p, q, beta=1.0, logits_are_probs=True)
    assert found.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


def test_functions_of_trl(capsys: pytest.CaptureFixture[str]) -> None:
    reader = tiny_tokenizer()
    ids, labels, mask, longest = build_teacher_inputs_from_texts(reader, ["The sky", "Q"], [" is", " blue."])
    assert longest == len(reader("The sky")["input_ids"]) and ids.shape == labels.shape == mask.shape
    for row, text in enumerate((" is", " blue.")):
        own = labels[row][labels[row] != -100]
        assert reader.decode(own) == f"{text}<|im_end|>" and torch.equal(own, ids[row][labels[row] != -100])
    print_prompt_completions_sample_uld(["[red]Why?", "[red]How?"], ["So.", "Thus."], 3, 1)
    assert capsys.readouterr().out.count("[red]") == 1  # no markup
    trainer = gold(lmbda=1.0)
    trainer.model_wrapped = other = tiny_model("gpt2", vocab_size=400)
    GOLDVLLMSyncCallback(trainer).on_step_end(trainer.args, trainer.state, trainer.control)
    assert trainer._generated.student.engine.model is other


def test_settings_without_effect_are_named() -> None:
    with pytest.warns(
        FutureWarning,
        match="vllm_sync_frequency -> nothing.*wandb_project -> nothing|wandb_project.*vllm_sync",
    ):
        GOLDConfig("out", use_cpu=True, vllm_sync_frequency=4, wandb_project="mine")


def test_completions_of_a_vllm_server_are_those_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_VLLM_SERVER_TOKEN", TOKEN)
    settings = {"lmbda": 1.0, "max_steps": 2, "learning_rate": 0.5}
    expected = gold(**settings)
    copy = LocalCopy(expected.model, expected.accelerator)
    writer = expected._generated.student._replace(engine=copy)
    expected._generated = dataclasses.replace(expected._generated, student=writer)
    expected.train()
    stand_in = StandIn(tiny_model("gpt2", vocab_size=400, dtype=torch.float64, seed=3))
    with serving(stand_in) as url:
        trainer = gold(**settings, **asks(url, free_port()))
        trainer.train()
        trainer._generated.student.engine.close()
    for one, other in zip(trainer.state.log_history[:2], expected.state.log_history[:2], strict=True):
        assert one["on_policy_loss"] == pytest.approx(other["on_policy_loss"], rel=1e-9)
    assert stand_in.calls.count("load") == 2


def test_what_follows_invalid_bytes_is_read_and_compared_too() -> None:
    trainer = gold()
    pairing, (own, other) = trainer.pairing, (trainer.processing_class, trainer.teacher_tokenizer)
    half = pairing.known[0].index("中".encode()[:1])

    def ids(text: str) -> list[int]:
        return own(text)["input_ids"]

    completion = [*ids("It is"), half, *ids(" blue."), half, half, *ids(" Look"), own.eos_token_id]
    made, texts = pairing.translated(completion, to_teacher=True, ended=True)
    assert other.decode(made) == "It is\ufffd blue.\ufffd\ufffd Look</s>"
    assert texts == ["It is", " blue.", "", " Look"]
    sides = [{"input_ids": [5, *row], "completion_mask": [0] + [1] * len(row)} for row in (completion, made)]
    spans = spans_of(pairing.row(*sides, texts=texts), (own, other))
    assert "".join(text for text, _ in spans) == "".join(text for _, text in spans) == "It is blue. Look"
    # A character that is not finished at the end of a completion that was cut is left out.
    made, texts = pairing.translated([*ids("It is"), half], to_teacher=True, ended=False)
    assert (other.decode(made), texts) == ("It is", ["It is"])
