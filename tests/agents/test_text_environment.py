"""Episodes of a model that calls tools: turns, limits, masks, rewards; with a script and with a model that learnt one."""

import pytest
import torch

from tests.tiny import tiny_model, tiny_seq2seq
from tests.tiny_tokenizers import tiny_tokenizer
from trl import TextEnvironment
from trl.generation.engine import Generated

TOKENIZER = tiny_tokenizer()


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Script:
    """An engine that says given texts: `turns[stream]` of each episode, one after another."""

    def __init__(self, turns):
        self.turns, self.asked, self.first = [list(texts) for texts in turns], [], 0

    def generate(self, prompts, sampling, *, streams=None):
        self.asked.append(([TOKENIZER.decode(prompt) for prompt in prompts], list(streams), sampling))
        rows = [ids_of(self.turns[stream - self.first].pop(0)) for stream in streams]
        return [Generated(ids, torch.zeros(len(ids)), None, "stop") for ids in rows]


def double(query):
    return 2 * float(query)


def play(turns, queries=None, **options):
    engine = Script(turns)
    options = {"tools": [double], "reward_fn": lambda texts: [float(len(text)) for text in texts], **options}
    env = TextEnvironment(tokenizer=TOKENIZER, engine=engine, **options)
    return env.run(["What is it?"] * len(turns) if queries is None else queries), engine, env


def test_episodes_with_and_without_calls():
    turns = [
        ["<request><double>4<call>", " Result=8<submit>"],
        ["I do not know.<|im_end|>"],
        ["<request><double>four<call>", "<request><triple>4<call>", "Sorry<submit>"],
    ]
    (queries, responses, masks, rewards, histories), engine, _ = play(turns, prompt="Q: ")
    texts = [history.text for history in histories]
    assert texts[0] == "Q: What is it?<request><double>4<call>8.0<response> Result=8<submit>"
    assert texts[1] == "Q: What is it?I do not know."  # the end token is among the tokens, not in the text
    assert responses[1].tolist() == ids_of("I do not know.<|im_end|>")
    assert texts[2].endswith(
        "four<call>ValueError: could not convert string to float: 'four'<response>"
        "<request><triple>4<call>Unknown tool triple. Tools: double.<response>Sorry<submit>"
    )
    for query, response, mask, history in zip(queries, responses, masks, histories, strict=True):
        assert query.tolist() == ids_of("Q: What is it?")
        assert torch.equal(torch.cat([query, response]), history.tokens)
        assert len(mask) == len(response)
        assert history.completed and not history.truncated
    said = ids_of("<request><double>4<call>"), ids_of("8.0<response>"), ids_of(" Result=8<submit>")
    assert responses[0].tolist() == [token for part in said for token in part]
    assert masks[0].tolist() == [1] * len(said[0]) + [0] * len(said[1]) + [1] * len(said[2])
    assert masks[1].tolist() == [1] * len(responses[1])
    assert [reward.tolist() for reward in rewards] == [len(" Result=8<submit>"), 14, len("Sorry<submit>")]
    assert [streams for _, streams, _ in engine.asked] == [
        [0, 1, 2],
        [0, 2],
        [2],
    ]  # who is done writes no more
    assert engine.asked[1][0] == [
        texts[0][: texts[0].index(" Result")],
        texts[2][: texts[2].index("<request><tri")],
    ]


def test_turns_are_limited():
    calls = ["<request><double>4<call>"] * 9
    (_, responses, masks, _, histories), engine, _ = play([calls, ["done<submit>"]], max_turns=3)
    assert len(engine.asked) == 3
    assert (histories[0].completed, histories[0].truncated) == (True, True)
    assert (histories[1].completed, histories[1].truncated) == (True, False)
    assert histories[0].text.count("8.0<response>") == 3
    assert masks[0].sum() == 3 * len(ids_of(calls[0]))
    assert len(responses[0]) == 3 * (len(ids_of(calls[0])) + len(ids_of("8.0<response>")))


def test_answers_of_tools_are_limited():
    """In characters, the dots at the end counted; an answer of just that length stays."""
    for limit, kept in ((15, "Seven apples..."), (2, ".."), (27, "Seven apples and 12 pears. ")):
        tools = {"double": lambda query, times=1 + (limit < 27): "Seven apples and 12 pears. " * times}
        (_, _, masks, _, histories), _, env = play(
            [["<request><double>4<call>", "<submit>"]], tools=tools, max_tool_reponse=limit
        )
        assert env.max_tool_response == limit
        begin, end = histories[0].token_spans[2]
        assert histories[0].tokens[begin:end].tolist() == ids_of(kept + "<response>")
        assert (masks[0] == 0).sum() == end - begin


def test_rewards():
    seen = {}

    def exact(texts, answers, name=None):
        seen.update(texts=texts, name=name)
        return torch.tensor([float(answer in text) for text, answer in zip(texts, answers, strict=True)])

    turns = [["<request><double>4<call>", "8<submit>"], ["<request><double>4<call>"]]
    env = TextEnvironment(tokenizer=TOKENIZER, engine=Script(turns), tools=[double], reward_fn=exact, max_turns=2)
    env.engine.turns[1] += ["<request><double>5<call>"]
    rewards = env.run(["a", "b"], answers=["8", "10"], name="n").rewards
    assert [reward.item() for reward in rewards] == [1.0, 0.0]  # what a tool said does not count
    assert seen == {"texts": ["8<submit>", "<request><double>5<call>"], "name": "n"}
    one = play([["a<submit>"], ["b<submit>"]], reward_fn=lambda texts: 1)[0].rewards
    assert [reward.item() for reward in one] == [1.0, 1.0]
    assert play([["a<submit>"]], reward_fn=None)[0].rewards == [None]
    for rewards, words in [
        ([1.0], "reward_fn gave 1 values, expected 2"),
        ([1.0, float("nan")], r"reward_fn gave nan for text 1, expected a finite number for each of 2"),
        ([None, 1.0], "reward_fn gave None for text 0"),
        (None, "reward_fn gave None .*expected a list"),
    ]:
        with pytest.raises(ValueError, match=words):
            play([["a<submit>"], ["b<submit>"]], reward_fn=lambda texts, given=rewards: given)


def test_bad_input():
    for options, message in [
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
        ({"max_tool_reponse": 0}, "max_tool_reponse must be at least 1"),
        ({"generation_kwargs": {"num_beams": 3}}, "num_beams=3, which rollouts do not support"),
        ({"max_length": 3}, r"queries\[0\] has \d+ tokens with the prompt, more than max_length=3"),
        ({"queries": "What?"}, "queries must be a list of one text or more, got 'What\\?'"),
        ({"queries": []}, "queries must be a list"),
    ]:
        with pytest.raises(ValueError, match=message):
            play([["a"]], **options)
    with pytest.raises(ValueError, match="needs a model and its tokenizer, got None"):
        TextEnvironment(tokenizer=TOKENIZER)
    with pytest.raises(TypeError, match="an encoder-decoder"):
        TextEnvironment(tiny_seq2seq("t5"), TOKENIZER)


# ---- with models


def test_a_model_that_learnt_to_call_its_tool():
    """The whole way through the embedded engine: two turns, and the tool's answer between them."""
    model = tiny_model("llama", vocab_size=len(TOKENIZER), initializer_range=0.05)
    lessons = [f"Q: {n} A<request><double>{n}<call>{2 * n}.0<response>R={2 * n}<submit>" for n in range(2, 7)]
    rows = [ids_of(lesson) for lesson in lessons]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill(torch.arange(width) >= torch.tensor([[len(row)] for row in rows]), -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    settings = {"do_sample": False, "max_new_tokens": 30}
    env = TextEnvironment(model, TOKENIZER, [double], lambda texts: 1.0, generation_kwargs=settings)
    episodes = env.run([f"Q: {n} A" for n in range(2, 7)])
    assert [history.text for history in episodes.histories] == lessons
    for mask, history in zip(episodes.masks, episodes.histories, strict=True):
        assert (mask == 0).sum() == len(ids_of(history.text[slice(*history.text_spans[2])]))
        assert len(history.text_spans) == 4
