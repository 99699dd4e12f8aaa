"""The win rate callback: what it compares, what it logs, and that training does not notice."""

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import GenerationConfig

from tests.tiny import tiny_model
from tests.trainer import grpo_runs
from tests.trainer.callbacks.runs import PROMPTS, prompt_dataset, trainer
from trl.experimental.judges import BasePairwiseJudge
from trl.experimental.winrate_callback import WinRateCallback
from trl.models.reference import FrozenModel
from trl.rewards import ManagedJudge
from trl.trainer.samples import sample_completions

GREEDY = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=2, pad_token_id=0)


class Keeps(BasePairwiseJudge):
    """Answers with the next of `answers` and keeps what it was shown."""

    def __init__(self, *answers):
        self.answers, self.shown = list(answers), []

    def judge(self, prompts, completions, shuffle_order=True):
        self.shown += list(zip(prompts, completions, strict=True))
        return [self.answers.pop(0) for _ in prompts]


def logged(run, name):
    return [entry[name] for entry in run.state.log_history if name in entry]


def test_equal_completions_are_ties_and_cost_nothing(tmp_path):
    """Before the first step the model is what it is compared with: a win rate of a half, and no question to the judge."""
    run, judge = trainer(tmp_path, eval_dataset=prompt_dataset()), Keeps()
    callback = WinRateCallback(judge, run, GREEDY)
    run.add_callback(callback)
    callback.on_evaluate(run.args, run.state, run.control)
    assert judge.shown == [] and logged(run, "eval_win_rate") == [0.5]


def test_wins_intervals_and_missing_answers(tmp_path, capsys):
    run, judge = trainer(tmp_path, eval_dataset=prompt_dataset(), steps=1), Keeps(1, -1, 0)
    callback = WinRateCallback(judge, run, GREEDY, against=["x", "y", "z"])
    callback.on_evaluate(run.args, run.state, run.control)
    assert [prompt for prompt, _ in judge.shown] == PROMPTS and [pair[0] for _, pair in judge.shown] == list("xyz")
    assert logged(run, "eval_win_rate") == [0.5]
    assert logged(run, "eval_win_rate_unanswered") == [pytest.approx(1 / 3)]
    (low,), (high,) = logged(run, "eval_win_rate_low"), logged(run, "eval_win_rate_high")
    assert 0 < low < 0.5 < high < 1
    assert [row["winner_index"] for row in callback.table] == [1, None, 0]
    assert "winner_index" in capsys.readouterr().out


def test_both_orders_of_a_managed_judge(tmp_path):
    """The second text wins in both orders, then the first is shown twice as the better one, then no answer."""
    run, judge = trainer(tmp_path, eval_dataset=prompt_dataset(), steps=1), Keeps(1, 0, -1, 0, 0, 1)
    callback = WinRateCallback(ManagedJudge(judge, swap_positions=True), run, GREEDY, against=["x", "y", "z"])
    callback.on_evaluate(run.args, run.state, run.control)
    assert logged(run, "eval_win_rate") == [0.75] and logged(run, "eval_win_rate_agreement") == [0.5]
    assert [row["winner_index"] for row in callback.table] == [1, None, None]


def test_the_reference_of_a_trainer_is_compared_with(tmp_path):
    run, judge = trainer(tmp_path, eval_dataset=prompt_dataset(), steps=1), Keeps(*[1] * 6)
    run.reference = FrozenModel(tiny_model("llama", seed=5), None)
    callback = WinRateCallback(judge, run, GREEDY)
    callback.on_train_begin(run.args, run.state, run.control)
    callback.on_evaluate(run.args, run.state, run.control)
    assert judge.shown and {pair[0] for _, pair in judge.shown} <= set(callback.against)
    ties = 3 - len(judge.shown) // 2  # where both models say the same
    assert logged(run, "eval_win_rate") == [pytest.approx(1 - ties / 6)] * 2  # at the start, and in the evaluation


def test_an_evaluation_before_training_completes_prompts_once(tmp_path, monkeypatch):
    run, calls = trainer(tmp_path, eval_dataset=prompt_dataset(), steps=1), []

    def count(*given, **named):
        calls.append(given)
        return sample_completions(*given, **named)

    monkeypatch.setattr("trl.trainer.callbacks.win_rate.sample_completions", count)
    WinRateCallback(Keeps(), run, GREEDY).on_evaluate(run.args, run.state, run.control)
    assert len(calls) == 1 and logged(run, "eval_win_rate") == [0.5]


@pytest.mark.parametrize("start", [False, True])
def test_the_win_rate_before_training_is_the_baseline(tmp_path, start):
    """Of the policy against what it is compared with: the same texts are ties, others are shown to the judge."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": start, "learning_rate": 0.0}

    def rates(folder, answers=(), **more):
        rows = [{"prompt": text, "input_ids": [4, 5], "labels": [4, 5]} for text in PROMPTS]
        run = trainer(tmp_path / folder, eval_dataset=Dataset.from_list(rows), **options)
        run.add_callback(WinRateCallback(Keeps(*answers), run, GREEDY, **more))
        run.train()
        return [(entry["step"], entry["eval_win_rate"]) for entry in run.state.log_history if "eval_win_rate" in entry]

    assert rates("itself") == [(0, 0.5), (2, 0.5), (4, 0.5)]
    answers = [1, 0, 0] * 3
    assert rates("others", answers, against=["x", "y", "z"]) == [(n, pytest.approx(1 / 3)) for n in (0, 2, 4)]


def test_the_judge_is_called_once_with_all_pairs_under_lora(tmp_path):
    given = {"peft_config": LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False)}
    given["eval_dataset"] = Dataset.from_dict({"prompt": [f"w{i} w9" for i in range(4, 12)]})
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.0,
    }
    run, _ = grpo_runs.make(folder=str(tmp_path), given=given, **options)
    judge = Keeps(*[0] * 24)
    judge.judge, calls = lambda prompts, pairs, **_: calls.append(len(prompts)) or [0] * len(prompts), []
    run.add_callback(WinRateCallback(judge, run, GREEDY, against=["x"] * 8))
    run.train()
    assert calls == [8, 8, 8]


def test_conversations_are_rendered_for_model_and_judge(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    run, judge = trainer(tmp_path, eval_dataset=Dataset.from_list(rows)), Keeps(1, 1, 1)
    run.processing_class.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    callback = WinRateCallback(judge, run, GREEDY, against=["x"] * 3)
    callback.on_evaluate(run.args, run.state, run.control)
    assert [prompt for prompt, _ in judge.shown] == PROMPTS


def test_checkpoints_keep_the_completions_before_training(tmp_path):
    def run_of(**options):
        run = trainer(tmp_path, eval_dataset=prompt_dataset(), save_strategy="steps", save_steps=2, **options)
        callback = WinRateCallback(Keeps(), run, GREEDY)
        run.add_callback(callback)
        return run, callback

    run, first = run_of(steps=2)
    run.train()
    run, second = run_of(steps=4)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.against == first.against


def test_a_run_resumed_elsewhere_keeps_what_it_is_compared_with(tmp_path, caplog):
    def run_of(folder):
        trainer, _ = grpo_runs.make(folder=str(folder), max_steps=2, save_strategy="steps", save_steps=1, beta=0.0)
        trainer.eval_dataset = prompt_dataset()
        callback = WinRateCallback(Keeps(), trainer, GREEDY)
        trainer.add_callback(callback)
        return trainer, callback

    trainer, first = run_of(tmp_path / "a")
    trainer.train()
    trainer, second = run_of(tmp_path / "b")
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert second.against == first.against
    trainer, without = run_of(tmp_path / "c")
    trainer.remove_callback(without)
    trainer.train()
    trainer, _ = run_of(tmp_path / "d")
    trainer.train(resume_from_checkpoint=str(tmp_path / "c" / "checkpoint-1"))
    assert "against the resumed model" in caplog.text


def test_wrong_arguments(tmp_path):
    run = trainer(tmp_path)
    with pytest.raises(ValueError, match="eval_dataset"):
        WinRateCallback(Keeps(), run)
    run = trainer(tmp_path, eval_dataset=prompt_dataset())
    with pytest.raises(ValueError, match="against"):
        WinRateCallback(Keeps(), run, against=["x"])
    with pytest.raises(ValueError, match="num_prompts"):
        WinRateCallback(Keeps(), run, num_prompts=0)
    with pytest.raises(TypeError, match="judge"):
        WinRateCallback(None, run)
    for judge in (Keeps(), ManagedJudge(Keeps())):
        with pytest.raises(TypeError, match="return_scores"):
            WinRateCallback(judge, run, use_soft_judge=True)
