"""The judges themselves: what they ask, how answers are read, and what becomes of failures."""

import json
import logging
import math
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from examples.served_judge import ServedJudge

from tests.generation.stand_in import TOKEN, StandIn, serving
from tests.rewards.judges_for_tests import IsLong
from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl.experimental.judges import AllTrueJudge, BaseBinaryJudge, HfPairwiseJudge, OpenAIPairwiseJudge
from trl.generation.serving.connection import VARIABLE
from trl.rewards.functions import resolve_judge

TEMPLATE = "{prompt}|{response0}|{response1}"


def reply(text):
    return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])


class FakeClient:
    """Both clients at once: `answer(content)` says what the model says."""

    def __init__(self, answer):
        self.asked, self.options, self._answer = [], [], answer
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.chat_completion))

    def chat_completion(self, *, messages, **options):
        [message] = messages
        assert message["role"] == "user"
        self.asked.append(message["content"])
        self.options.append(options)
        return reply(self._answer(message["content"]))


def prefers_longer(content):
    _, first, second = content.split("|")
    return "0" if len(first) > len(second) else "1"


def made(kind, answer, **options):
    client = FakeClient(answer)
    cls = {"hf": HfPairwiseJudge, "openai": OpenAIPairwiseJudge}[kind]
    return cls(system_prompt=TEMPLATE, client=client, **options), client


PAIRS = [[f"{'x' * (row + 1)}", "yy"] for row in range(64) if row != 1]
PROMPTS = [f"question {row}" for row in range(len(PAIRS))]


@pytest.mark.parametrize("kind", ["hf", "openai"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_answer_is_that_of_the_order_given(kind, shuffle):
    judge, client = made(kind, prefers_longer)
    assert judge.judge(PROMPTS, PAIRS, shuffle_order=shuffle) == [
        int(len(b) > len(a)) for a, b in PAIRS
    ]  # whatever was shown first
    shown_first = {content.split("|")[0]: content.split("|")[1] for content in client.asked}
    turned = sum(shown_first[prompt] == "yy" for prompt in PROMPTS)
    assert turned == 0 if not shuffle else 20 <= turned <= 43  # 63 fair coins: 3 deviations of 4
    assert client.options[0]["max_tokens"] == 1


@pytest.mark.parametrize(("answer", "expected"), [(" 1\n", 1), ("0", 0), ("", -1), (None, -1), ("Response 1", -1)])
def test_answers_that_are_no_verdict_are_minus_one(answer, expected):
    judge, _ = made("openai", lambda content: answer)
    assert judge.judge(["q"], [["a", "b"]], shuffle_order=False) == [expected]


def test_a_request_that_fails_is_minus_one_and_said_once(caplog):
    def answer(content):
        if content.startswith("question 1|"):
            raise ConnectionError("gone")
        return prefers_longer(content)

    judge, _ = made("hf", answer)
    with caplog.at_level(logging.WARNING):
        first, again = (judge.judge(PROMPTS[:4], PAIRS[:4], shuffle_order=False) for _ in range(2))
    assert first == again == [1, -1, 0, 0]
    said = [record.getMessage() for record in caplog.records if "HfPairwiseJudge" in record.getMessage()]
    assert len(said) == 1
    assert "1 of 4 requests failed (ConnectionError: gone)" in said[0]


def test_a_judge_of_which_every_request_fails_raises():
    def answer(content):
        raise PermissionError("no such key")

    judge, _ = made("openai", answer)
    with pytest.raises(PermissionError, match="no such key"):
        judge.judge(PROMPTS[:3], PAIRS[:3])


def test_requests_are_limited_which_is_said_once(caplog):
    judge, client = made("openai", lambda content: "1", max_requests=5)
    with caplog.at_level(logging.WARNING):
        found = [judge.judge(PROMPTS[:4], PAIRS[:4], shuffle_order=False) for _ in range(3)]
    assert found == [[1] * 4, [1, -1, -1, -1], [-1] * 4]
    assert len(client.asked) == judge.num_requests == 5
    assert sum("5 requests (max_requests)" in record.getMessage() for record in caplog.records) == 1


def test_requests_run_at_the_same_time():
    together = threading.Barrier(4, timeout=10)  # breaks unless four wait at once
    judge, _ = made("hf", lambda content: together.wait() * 0 or prefers_longer(content), max_workers=4)
    assert judge.judge(PROMPTS[:8], PAIRS[:8], shuffle_order=False) == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: made("hf", None)[0].judge(["q"], [["a"]]), r"prompt 'q' has \['a'\], expected a list of two"),
        (lambda: made("hf", None)[0].judge(["q"], ["ab"]), "prompt 'q' has 'ab', expected a list of two"),
        (lambda: HfPairwiseJudge(system_prompt="{prompt} {response0}", client=1), "expected the placeholders prompt, response0"),
        (lambda: HfPairwiseJudge(system_prompt="{prompt} {", client=1), "system_prompt has .*expected the placeholders"),
        (lambda: OpenAIPairwiseJudge(max_requests=-1, client=1), "max_requests must be a whole number >= 0 or None, got -1"),
        (lambda: HfPairwiseJudge(max_workers=0, client=1), "max_workers must be a whole number >= 1, got 0"),
        (lambda: AllTrueJudge([]), "judges is empty"),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Constant(BaseBinaryJudge):
    def __init__(self, *answers):
        self.answers = list(answers)

    def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        return self.answers


def test_all_must_say_yes_and_one_no_is_no():
    both = AllTrueJudge([Constant(1, 1, 1, 0, 0, -1), Constant(1, 0, -1, -1, 0, -1)])
    assert both.judge(["q"] * 6, ["a"] * 6) == [1, 0, -1, 0, 0, -1]
    assert AllTrueJudge([IsLong(), IsLong()]).judge(["q"] * 2, ["abcd", "abcd"], ["abc", "abcdef"]) == [1, 0]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ((1, 0.5), "Constant gave .*0.5"),
        ((1, None), "Constant gave .*None"),
        ((1,), r"Constant gave \[1\], expected 1, 0 or -1 for each of 2"),
    ],
)
def test_a_judge_of_all_true_that_answers_something_else(answers, message):
    with pytest.raises(ValueError, match=message):
        AllTrueJudge([Constant(*answers)]).judge(["q"] * 2, ["a"] * 2)


# ---- a real client over a loopback server


class Handler(BaseHTTPRequestHandler):
    """Chat completions of a model that prefers the longer response; it fails where it is asked to."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body["model"], body["max_tokens"]))
        content = body["messages"][0]["content"]
        status = 400 if "fail" in content else 200
        message = {"role": "assistant", "content": prefers_longer(content)}
        found = {
            "id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        }  # fmt: skip
        answer = json.dumps(found if status == 200 else {"error": {"message": "refused"}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        """Say nothing."""


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.seen = []
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        yield found
        found.shutdown()


def test_a_judge_by_name_has_no_limit_of_its_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=lambda timeout: object()))
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    assert resolve_judge("openai").max_requests is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "or a path such as my_module.MyJudge, got 'nowhere'"),
        ("nowhere.Judge", "judge must be one of pair_rm.*There is no module 'nowhere'"),
        ("tests.rewards.judges_for_tests.IsShort", r"judge must be .* has \[.*'IsLong'"),
        ("tests.tiny.tiny_model", r"judge must be .* has \[\]"),
    ],
)
def test_a_wrong_path_of_a_judge(path, message):
    with pytest.raises(ValueError, match=message) as error:
        resolve_judge(path)
    assert "reward function" not in str(error.value)


def test_openai_over_http(server, monkeypatch):
    pytest.importorskip("openai", reason="the judges extra is not installed")
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    judge = OpenAIPairwiseJudge("a-model", system_prompt=TEMPLATE)
    found = judge.judge(["q", "fail", "q"], [["long", "x"], ["a", "bb"], ["x", "long"]])
    assert found == [0, -1, 1]
    assert set(server.seen) == {("/v1/chat/completions", "Bearer a-key", "a-model", 1)}


def test_hugging_face_over_http(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)  # it refuses loopback, too
    address = f"http://127.0.0.1:{server.server_port}/v1"
    judge = HfPairwiseJudge(address, token="a-token", system_prompt=TEMPLATE)
    assert judge.judge(["q", "fail", "q"], [["long", "x"], ["a", "bb"], ["x", "long"]]) == [0, -1, 1]
    assert {seen[:2] for seen in server.seen} == {("/v1/chat/completions", "Bearer a-token")}


def test_a_judge_behind_our_own_server(monkeypatch, tmp_path):
    """`examples/served_judge.py` over HTTP: pairs in one request, and answers in the order given."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)

    class Judges(StandIn):
        def about(self):
            return {**super().about(), "model": str(tmp_path)}

        def chat(self, asked):
            self.calls.append(asked)
            found = [re.findall(r"\[response \d\]\n(.*?)\n", each[0]["content"]) for each in asked.messages]
            answers = [str(int(len(second) > len(first))) for first, second in found]
            return {"completion_ids": [tokenizer(each, add_special_tokens=False)["input_ids"] for each in answers]}

    monkeypatch.setenv(VARIABLE, TOKEN)
    served = Judges(tiny_model("llama"))
    with serving(served) as url:
        judge = ServedJudge(url, connection_timeout=10)
        assert judge.judge(PROMPTS, PAIRS) == [int(len(b) > len(a)) for a, b in PAIRS]
    [asked] = served.calls
    assert (asked.temperature, asked.max_tokens, asked.guided_decoding_regex) == (0, 1, "[01]")


def test_a_missing_key_or_package_is_said(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setitem(sys.modules, "openai", ModuleType("openai"))
    with pytest.raises(ValueError, match="OPENAI_API_KEY is not set"):
        OpenAIPairwiseJudge()
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"pip install 'trl\[judges\]'"):
        OpenAIPairwiseJudge()


# ---- PairRM


class FakeBlender:
    """Scores a completion by its length."""

    def loadranker(self, name, device):
        self.loaded = (name, device)

    def rank(self, prompts, pairs, *, return_scores, disable_tqdm):
        assert disable_tqdm
        scores = np.array([[float(len(text)) for text in pair] for pair in pairs])
        return scores if return_scores else np.array([[1, 2] if a >= b else [2, 1] for a, b in scores])


@pytest.fixture
def pair_rm(monkeypatch):
    from trl.experimental.judges import PairRMJudge

    fake = ModuleType("llm_blender")
    fake.Blender = FakeBlender
    monkeypatch.setitem(sys.modules, "llm_blender", fake)
    return PairRMJudge()


@pytest.mark.parametrize("shuffle", [True, False])
def test_pair_rm(pair_rm, shuffle):
    assert pair_rm.blender.loaded[0] == "llm-blender/PairRM"
    assert pair_rm.judge(PROMPTS, PAIRS, shuffle_order=shuffle) == [int(len(b) > len(a)) for a, b in PAIRS]
    found = pair_rm.judge(PROMPTS, PAIRS, shuffle_order=shuffle, return_scores=True, temperature=2.0)
    expected = [1 / (1 + math.exp((len(b) - len(a)) / 2)) for a, b in PAIRS]
    assert found == pytest.approx(expected, abs=1e-12)
    assert pair_rm.judge([], []) == []
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        pair_rm.judge(["q"], [["a", "b"]], temperature=0)
