"""Teachers behind servers: their columns are the model's own top k, and every fault names the server and the row."""

import copy

import numpy as np
import openai
import pytest
import torch

from tests.teacher_server import TinyTeacher, serving, slow
from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.collators.preference import completion_batch
from trl.experimental.agents import Endpoint
from trl.generation import teacher_servers
from trl.generation.serving.connection import ServerLost
from trl.generation.teacher_servers import TeacherServer, TeacherServers
from trl.generation.transformers import live
from trl.generation.transformers.engine import TransformersEngine
from trl.models.packed.layout import padded_rows

TOKENIZER = tiny_tokenizer()
ROWS = [[3, 4, 5, 6], [7, 8], [9, 3, 10, 11, 12]]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=len(TOKENIZER), dtype=torch.float64)


@pytest.fixture
def teacher(model, monkeypatch):
    monkeypatch.setattr(teacher_servers, "FIRST_PAUSE_S", 0.01)
    with serving(TinyTeacher(model)) as running:
        yield running


def connect(teacher, *, top_k=3, **options):
    return TeacherServer(
        teacher.url,
        top_k=top_k,
        tokenizer=TOKENIZER,
        **{"vocabulary": len(TOKENIZER), "deadline": 20.0, **options},
    )


def expected(model, ids, k=3):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1).topk(k)


def unique_text(token):
    text = TOKENIZER.decode([token])
    same = [each for each in range(len(TOKENIZER)) if TOKENIZER.decode([each]) == text]
    return text if len(same) == 1 else f"token_id:{token}"


@pytest.mark.parametrize("form", ["vllm", "openai, ids", "openai, text"])
def test_the_columns_are_the_models_own(teacher, model, form):
    teacher.echoes = form != "vllm"
    teacher.text_of = unique_text if form == "openai, text" else teacher.text_of
    server = connect(teacher)
    assert server.model == "tiny"
    for ids, found in zip(ROWS, server.best(ROWS, ["a", "b", "c"]), strict=True):
        best = expected(model, ids)
        assert found[0].tolist() == best.indices.tolist()
        np.testing.assert_allclose(found[1], best.values.numpy(), rtol=1e-12)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_batches_of_every_layout_get_their_trained_tokens(teacher, model, layout):
    if layout == "shared":
        batch = completion_batch([([3, 4], [[5, 6], [7]]), ([8], [[9, 10, 11]])], prefix_sharing=True)
    else:
        collate = DataCollatorForLanguageModeling(0, padding_free=layout == "packed")
        masks = [[0, 0, 1, 1], [0, 1], [0, 1, 0, 1, 1]]
        batch = collate([{"input_ids": ids, "completion_mask": mask} for ids, mask in zip(ROWS, masks, strict=True)])
    servers = TeacherServers(connect(teacher))
    (found,) = servers.filled([batch], lambda each: padded_rows(each, pad_token_id=0))
    rows, best = padded_rows(batch, pad_token_id=0), []
    for ids, labels, mask in zip(rows["input_ids"], rows["labels"], rows["attention_mask"], strict=True):
        trained = labels[mask != 0][1:] != -100
        best.append(expected(model, ids[mask != 0].tolist()).indices[trained])
    assert torch.equal(found["teacher_ids"], torch.cat(best))
    assert len(found["teacher_ids"]) == len(found["teacher_logps"]) > 4


def test_rows_name_their_teacher(teacher, model):
    other = tiny_model("llama", vocab_size=len(TOKENIZER), seed=5, dtype=torch.float64)
    with serving(TinyTeacher(other)) as second:
        servers = TeacherServers({"first": connect(teacher), "second": connect(second)})
        batch = DataCollatorForLanguageModeling(0)([{"input_ids": ids} for ids in ROWS])
        batch["teacher"] = torch.tensor([1, 0, 1])
        (found,) = servers.filled([batch], lambda each: padded_rows(each, pad_token_id=0))
    models = [other, model, other]
    best = [expected(each, ids).indices for each, ids in zip(models, ROWS, strict=True)]
    assert torch.equal(found["teacher_ids"], torch.cat(best))


def test_a_request_has_at_most_eight_rows_and_the_key(teacher, monkeypatch):
    monkeypatch.setenv("TRL_TEACHER_SERVER_TOKEN", "key")
    monkeypatch.setenv("TRL_VLLM_SERVER_TOKEN", "other")
    servers = TeacherServers(connect(teacher))
    batch = DataCollatorForLanguageModeling(0)([{"input_ids": [3, 4, 5]}] * 6)
    before = len(teacher.requests)
    servers.filled([batch] * 3, lambda each: padded_rows(each, pad_token_id=0))
    assert sorted(len(body["prompt"]) for body in teacher.requests[before:]) == [2, 8, 8]
    assert {body["authorization"] for body in teacher.requests} == {"Bearer key"}


def changed(**of_choice):
    def fault(body, answer):
        answer = copy.deepcopy(answer)
        answer["choices"][0].update(of_choice)  # the last row, for the answer is in reverse order
        return answer

    return fault


def without_one(body, answer):
    return {"choices": answer["choices"][1:]}


def other_tokens(body, answer):
    answer["choices"][0]["prompt_logprobs"][1] = {
        "1": {"logprob": -1.0},
        "2": {"logprob": -1.0},
        "0": {"logprob": -1.0},
    }
    return answer


def fewer(body, answer):
    own = str(body["prompt"][-1][1])
    answer["choices"][0]["prompt_logprobs"][1] = {own: {"logprob": -1.0}}
    return answer


def nan(body, answer):
    own = answer["choices"][0]["prompt_logprobs"][1]
    own[next(iter(own))]["logprob"] = float("nan")
    return answer


FAULTS = {
    "too few rows": (without_one, "answered 2 of 3"),
    "another length": (changed(prompt_logprobs=[None]), "not the 5 of the prompt"),
    "other tokens": (other_tokens, "not the 5 of the prompt"),
    "no log-probs": (changed(prompt_logprobs=None), "malformed"),
    "malformed": (changed(prompt_logprobs=[None, 3, 3, 3, 3]), "malformed"),
    "too few tokens": (fewer, "teacher_top_k=3"),
    "NaN": (nan, "NaN"),
    "no choices": (lambda body, answer: {"choices": "none"}, "no list of choices"),
    "no JSON": (lambda body, answer: b"<html>", "<html>"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_wrong_answer_is_an_error_that_names_server_and_row(teacher, kind):
    server = connect(teacher)
    teacher.fault, words = FAULTS[kind]
    with pytest.raises(RuntimeError, match=words) as error:
        server.best(ROWS, ["row 0", "row 1", "row 2"])
    assert teacher.url in str(error.value)
    assert "row 2" in str(error.value) or kind == "no JSON"


def test_a_busy_server_is_tried_again(teacher, model):
    server, answers = connect(teacher), iter([503, 429, None])
    teacher.fault = lambda body, answer: next(answers, answer)
    (found,) = server.best(ROWS[:1], ["row 0"])
    assert found[0].tolist() == expected(model, ROWS[0]).indices.tolist()
    assert len(teacher.requests) == 2 + 4


@pytest.mark.parametrize("kind", ["late", "dead"])
def test_no_answer_in_time_stops_the_run(teacher, kind):
    server = connect(teacher)
    server.deadline = 0.3
    teacher.fault = slow(3.0) if kind == "late" else lambda body, answer: None
    with pytest.raises(ServerLost, match=r"row 0; no answer within 0.3 s.*teacher_server_timeout") as error:
        server.best(ROWS[:1], ["row 0"])
    assert teacher.url in str(error.value)


def test_a_server_that_refuses_requests_is_an_error_at_once(teacher):
    teacher.fault = lambda body, answer: 400
    with pytest.raises(ValueError, match="refused"):
        connect(teacher)
    with pytest.raises(ServerLost, match="its models"):
        TeacherServer("http://127.0.0.1:9", top_k=3, tokenizer=TOKENIZER, vocabulary=20, deadline=0.05)


def test_tokens_that_the_student_lacks_are_refused(teacher):
    with pytest.raises(RuntimeError, match="the student has 20 tokens"):
        connect(teacher, top_k=len(TOKENIZER), vocabulary=20)


@pytest.fixture(scope="module")
def endpoint(model):
    engine = TransformersEngine(model, tokenizer=TOKENIZER, reuse_memory=1 << 20)
    with Endpoint(engine, TOKENIZER, agent_sampling="agent", model_name="own") as running:
        yield running


@pytest.mark.parametrize("form", ["vllm", "openai, ids", "openai, text"])
def test_our_own_endpoint_teaches(endpoint, model, form, monkeypatch):
    monkeypatch.setattr(live, "_LOGITS", 3 * len(TOKENIZER))  # several parts
    session = endpoint.session(keeps=False)
    monkeypatch.setenv("TRL_TEACHER_SERVER_TOKEN", session.api_key)
    server = TeacherServer(session.base_url, top_k=3, tokenizer=TOKENIZER, vocabulary=len(TOKENIZER), deadline=30.0)
    assert server.model == "own" and not server._echoes
    if form != "vllm":
        server._echoes = True
    if form == "openai, text":  # tokens whose text is that of no other one
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        words = [token for token in range(3, 60) if unique_text(token) == TOKENIZER.decode([token])][:5]
        answer = client.completions.create(
            model="own", prompt=words, echo=True, logprobs=2, max_tokens=1, temperature=0
        )
        choice, best = answer.choices[0], expected(model, words)
        assert choice.text.startswith(TOKENIZER.decode(words)) and len(choice.logprobs.tokens) == 6
        assert choice.logprobs.token_logprobs[0] is None and answer.usage.prompt_tokens == 5
        own = [float(row[0]) for row in best.values]
        assert [max(entry.values()) for entry in choice.logprobs.top_logprobs[1:5]] == pytest.approx(own, rel=1e-12)
        return
    for ids, found in zip(ROWS, server.best(ROWS, ["a", "b", "c"]), strict=True):
        best = expected(model, ids)
        assert found[0].tolist() == best.indices.tolist()
        np.testing.assert_allclose(found[1], best.values.numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"logprobs": 5}, "logprobs"), ({"logprobs": 1}, "temperature=0"),
        ({"echo": True, "n": 2}, "n and stream"),
        ({"extra_body": {"prompt_logprobs": 999}}, "prompt_logprobs"), ({"prompt": [3] * 999, "echo": True}, "context length"),
    ],
)  # fmt: skip
def test_unsupported_scoring_is_refused(endpoint, given, named):
    session = endpoint.session(keeps=False)
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    with pytest.raises(openai.BadRequestError, match=named):
        client.completions.create(**{"model": "own", "prompt": [3, 4], **given})
