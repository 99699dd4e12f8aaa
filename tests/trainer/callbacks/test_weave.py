"""Weave gets traces without scorers, an evaluation with them. A stand-in plays the package."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from tests.trainer.callbacks.runs import PROMPTS, prompt_dataset, trainer
from trl.trainer.callbacks import WeaveCallback

GREEDY = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=2, pad_token_id=0)


class FakeWeave:
    """The part of weave 0.54 that the callback calls, recording what it is given."""

    def __init__(self):
        self.calls, self.facts = [], None

    def init(self, project):
        self.calls.append(("init", project))

    def get_client(self):
        return None

    def op(self, name):
        def wrap(function):
            def call(*args):
                self.calls.append((name, args, self.facts))
                return function(*args)

            return call

        return wrap

    @contextlib.contextmanager
    def attributes(self, facts):
        self.facts = facts
        yield

    def EvaluationLogger(self, *, model, dataset, eval_attributes):
        self.calls.append(("evaluation", model, dataset, eval_attributes["global_step"]))

        def log_prediction(inputs, output):
            def log_score(name, score):
                self.calls.append(("score", inputs["prompt"], name, score))

            return SimpleNamespace(log_score=log_score, finish=lambda: self.calls.append(("finish",)))

        summary = lambda values: self.calls.append(("summary", values))  # noqa: E731
        return SimpleNamespace(log_prediction=log_prediction, log_summary=summary)


@pytest.fixture
def weave(monkeypatch):
    fake = FakeWeave()
    monkeypatch.setitem(sys.modules, "weave", fake)
    monkeypatch.setattr("trl.trainer.callbacks.weave.find_spec", lambda name: object())
    return fake


def evaluate(tmp_path, **options):
    run = trainer(tmp_path, eval_dataset=prompt_dataset())
    callback = WeaveCallback(run, generation_config=GREEDY, num_prompts=2, **options)
    state = SimpleNamespace(global_step=4, epoch=1.0, is_world_process_zero=True)
    callback.on_train_begin(run.args, state, None)
    callback.on_evaluate(run.args, state, None)
    callback.on_evaluate(run.args, state, None)  # a second evaluation set at the same step
    return callback


def test_traces(tmp_path, weave):
    callback = evaluate(tmp_path, project_name="p")
    assert not callback.is_evaluation_mode
    assert weave.calls[0] == ("init", "p")
    assert [call[1][0] for call in weave.calls[1:]] == PROMPTS[:2]
    assert weave.facts == {
        "epoch": 1.0,
        "global_step": 4,
        "dataset": "eval_dataset",
        "model": "LlamaForCausalLM",
    }


def test_an_evaluation_with_scores(tmp_path, weave):
    scorers = {
        "words": lambda prompt, completion: len(prompt.split()),
        "both": lambda prompt, completion: {"yes": True, "why": "x"},
    }
    callback = evaluate(tmp_path, project_name="p", scorers=scorers, model_name="m", dataset_name="d")
    assert callback.is_evaluation_mode
    kinds = [call[0] for call in weave.calls]
    assert kinds == ["init", "evaluation", "score", "score", "finish", "score", "score", "finish", "summary"]
    assert weave.calls[1] == ("evaluation", "m", "d", 4)
    summary = weave.calls[-1][1]
    assert (summary["words"], summary["both.yes"]) == (3.0, 1.0)
    assert "both.why" not in summary


def test_a_project_is_needed(tmp_path, weave):
    with pytest.raises(ValueError, match="project_name"):
        evaluate(tmp_path)


def test_without_the_package(tmp_path):
    with pytest.raises(ImportError, match="pip install weave"):
        WeaveCallback(trainer(tmp_path, eval_dataset=prompt_dataset()))
