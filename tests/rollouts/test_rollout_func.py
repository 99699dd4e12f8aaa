"""Rollout functions: which can be called, and what they may answer."""

import pytest
import torch

from trl.rollouts.experience import SAMPLING_LOGPS, STOPPED
from trl.rollouts.rollout_func import check_rollout_func, read_rollouts

IDS = {"prompt_ids": [[3], [3, 9]], "completion_ids": [[4, 2], [5, 6, 7]]}
LIMITS = {"end_tokens": {2}, "vocabulary": 10, "context_length": 5}


def test_an_answer_becomes_an_experience():
    given = {
        **IDS,
        "logprobs": [[-1.0, 0.0], torch.tensor([-1.0, -2.0, 0.001])],
        "fit": (1, None),
        "left": None,
    }
    found = read_rollouts({**given, "completion_ids": [[4, 2], torch.tensor([5, 6, 7])]}, 2, **LIMITS)
    assert [row.tolist() for row in found.experience.completions.split()] == [[4, 2], [5, 6, 7]]
    assert found.experience.per_row[STOPPED].tolist() == [True, False] and found.fields == {"fit": [1, None]}
    assert found.experience.per_token[SAMPLING_LOGPS].tolist() == pytest.approx([-1, 0, -1, -2, 0.001])


def test_fields_may_be_iterators():
    found = read_rollouts(
        {**IDS, "prompt_ids": (ids for ids in IDS["prompt_ids"]), "fit": map(abs, (-1, 2))}, 2, **LIMITS
    )
    assert found.fields == {"fit": [1, 2]}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"completion_ids": [[4], [10]]}, ValueError, "returned 10 in completion_ids of row 1, expected ids from 0 to 9"),
        ({"prompt_ids": [[-1], [3]]}, ValueError, "returned -1 in prompt_ids of row 0"),
        ({"completion_ids": [[4.5], [4]]}, ValueError, "returned 4.5 in completion_ids of row 0"),
        ({"completion_ids": ["ab", "cd"]}, ValueError, "returned 'a' in completion_ids of row 0"),
        ({"prompt_ids": [[3], []]}, ValueError, "returned nothing in prompt_ids of row 1"),
        ({"completion_ids": [[], [4]]}, ValueError, "returned nothing in completion_ids of row 0"),
        ({"completion_ids": [[4], [4] * 4]}, ValueError, "6 tokens in row 1"),
        ({"logprobs": [[-1.0, float("nan")], [-1.0] * 3]}, ValueError, "logprobs .*got nan"),
        ({"logprobs": [[0.5, 0.9], [0.1] * 3]}, ValueError, "logprobs .*got 0.5"),
        ({"logprobs": [[-1.0], [-1.0] * 3]}, ValueError, "1 logprobs for 2 tokens"),
        ({"env": 3}, TypeError, "a list as env, got int"),
        ({"prompt_ids": 5}, TypeError, "a list as prompt_ids, got int"),
        ({"completion_ids": torch.tensor(5)}, TypeError, "a list as completion_ids, got Tensor"),
        ({"prompt_ids": [[3], 5]}, TypeError, "a list as row 1 of prompt_ids, got int"),
        ({"logprobs": [[[-1.0], [-1.0]], [-1.0] * 3]}, ValueError, "lists in logprobs of row 0, expected a number for"),
        ({"logprobs": [-1.0, -2.0]}, TypeError, "a list as row 0 of logprobs, got float"),
        ({"fit": [3]}, ValueError, "must return 2 fit"),
    ],
)  # fmt: skip
def test_answers_that_are_none_are_named(given, error, words):
    with pytest.raises(error, match=words):
        read_rollouts({**IDS, **given}, 2, **LIMITS)


def test_a_function_is_looked_at_before_it_is_called():
    check_rollout_func(lambda prompts, trainer, more=None: None)
    check_rollout_func(lambda *given: None)
    with pytest.raises(TypeError, match=r"a function of \(prompts, trainer\): missing a required argument"):
        check_rollout_func(lambda prompts, args, processing_class: None)
    with pytest.raises(TypeError, match=": 3 is not a callable"):
        check_rollout_func(3)
