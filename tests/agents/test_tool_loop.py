"""Rollouts in turns: who goes on, where a row ends, what is counted, and which tokens are whose."""

import pytest
import torch

from tests.agents.tool_words import ADD, BROKEN, FAIL, MISFIT, TOOLS, UNKNOWN, WAIT, call_tokenizer
from tests.tiny import tiny_model
from trl.agents.tool_loop import CALLS, FAILED_OF, LIMITED, ToolLoop, tool_counts
from trl.agents.tools import tools_of
from trl.generation.engine import Generated, Sampling
from trl.generation.transformers.engine import TransformersEngine

WORDS = call_tokenizer()
END = WORDS.eos_token_id
PROMPT = WORDS("<tools> <user> What is one ? </s> <assistant>")["input_ids"]


class Script:
    """Says for each row, by its prompt's first token, one text after another, cut at its limit."""

    def __init__(self, *rows):
        self.rows, self.asked, self.streams = [list(texts) for texts in rows], [], []

    def __call__(self, contexts, *, streams, limits):
        self.asked.append([WORDS.decode(ids[1:]) for ids in contexts])
        self.streams.append(list(streams))
        found = []
        for ids, limit in zip(contexts, limits, strict=True):
            text = self.rows[ids[0]].pop(0)
            said = WORDS(text)["input_ids"][:limit]
            logps = -torch.arange(1.0, len(said) + 1)
            found.append(Generated(said, logps, None, "stop" if said[-1] == END else "length"))
        return found


def play(script, *, iterations=None, length=40, window=None, deadline=5.0):
    loop = ToolLoop(WORDS, tools_of(TOOLS), iterations=iterations, deadline=deadline, context_length=window)
    count = len(script.rows)
    return loop.play(
        [[row, *PROMPT] for row in range(count)],
        script,
        Sampling(max_new_tokens=length, stop_token_ids=(END,)),
        streams=range(100, 100 + count),
        template_kwargs=[{}] * count,
    )


def test_rows_go_on_behind_answers_and_leave_when_they_are_done():
    script = Script([f"hi {ADD} </s>", "3 </s>"], ["no </s>"], [f"{WAIT} {FAIL} </s>", f"{ADD} </s>", "yes </s>"])
    found = play(script)
    assert [len(asked) for asked in script.asked] == [3, 2, 1]
    first, (chain,) = found[0], found[0].chains
    assert WORDS.decode(chain.ids) == f"hi {ADD} </s> <tool> 3 </s> <assistant> 3 </s>"
    assert [m["role"] for m in first.messages] == ["assistant", "tool", "assistant"]
    assert first.messages[1] == {"role": "tool", "name": "add", "content": "3"}
    assert first.messages[2] == {"role": "assistant", "content": "3"}
    assert chain.sampled == [True] * 3 + [False] * 4 + [True] * 2
    assert chain.logps == [-1, -2, -3, 0, 0, 0, 0, -1, -2]
    assert [one.chains[0].ended for one in found] == [True] * 3 and [one.calls for one in found] == [1, 0, 3]
    assert found[2].failures == {"raised": 1}
    assert [m["content"] for m in found[2].messages if m["role"] == "tool"][1:] == [
        "Error: OSError: no such luck",
        "3",
    ]
    # Each turn has a stream of its own, whoever else goes on.
    assert script.streams[0] == [100, 101, 102] and len({s for turn in script.streams for s in turn}) == 6
    assert script.streams[1][1] - 102 == script.streams[1][0] - 100


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        (BROKEN, "malformed", "the call is not JSON"),
        (UNKNOWN, "unknown", "unknown tool 'fly'"),
        (MISFIT, "arguments", "argument 'a' must be integer"),
        (FAIL, "raised", "OSError: no such luck"),
    ],
)
def test_what_goes_wrong_is_told_and_counted(text, kind, told):
    (found,) = play(Script([f"{text} </s>", "hi </s>"]))
    assert found.messages[1]["role"] == "tool" and found.messages[1]["content"].startswith("Error:")
    assert told in found.messages[1]["content"]
    rows = tool_counts([found])
    assert rows[CALLS] == [1] and rows[FAILED_OF + kind] == [1]
    assert found.chains[0].ended and sum(found.failures.values()) == 1


def test_an_endless_loop_ends_at_the_limit_and_is_counted():
    found = play(Script([f"{ADD} </s>"] * 9, ["hi </s>"]), iterations=3)
    assert found[0].calls == 3 and [m["role"] for m in found[0].messages] == ["assistant", "tool"] * 3 + ["assistant"]
    assert tool_counts(found)[LIMITED] == [True, False]
    assert [one.chains[0].ended for one in found] == [False, True]


@pytest.mark.parametrize(("length", "window"), [(20, None), (99, 20 + 1 + len(PROMPT))])
def test_without_a_limit_it_ends_at_its_length(length, window):
    """A turn has 2 tokens, an answer 4; after three rounds 18 are used, and the next turn fills the 20."""
    (found,) = play(Script([f"{ADD} </s>"] * 9), length=length, window=window)
    (chain,) = found.chains
    assert len(chain.ids) == 20 and not chain.ended and not found.limited
    assert found.calls == 4 and [m["role"] for m in found.messages][-2:] == ["tool", "assistant"]


def test_answers_that_do_not_fit_are_left_out():
    (found,) = play(Script([f"hi {ADD} </s>"]), length=7)  # 3 + 4: nothing could follow
    assert WORDS.decode(found.chains[0].ids) == f"hi {ADD} </s>" and len(found.messages) == 1
    assert not found.chains[0].ended and found.calls == 1
    (found,) = play(Script([f"hi {ADD} </s>", "no no"]), length=8)
    (chain,) = found.chains
    assert len(chain.ids) == 8 and chain.sampled == [True] * 3 + [False] * 4 + [True]


def test_calls_of_a_turn_that_was_cut_off_are_not_made():
    (found,) = play(Script([f"hi {ADD} no no"]), length=3)
    assert (
        found.calls == 0
        and not found.chains[0].ended
        and found.messages[0]["tool_calls"][0]["function"]["name"] == "add"
    )


def test_with_an_engine_a_row_is_the_same_whoever_stands_beside_it():
    """And its log-probs are those of one forward over all of it, to 1e-5 in float32, after several turns."""
    model = tiny_model("llama", vocab_size=len(WORDS), initializer_range=0.2, seed=3)
    engine = TransformersEngine(model, tokenizer=WORDS)
    ends = (END, *WORDS.convert_tokens_to_ids(["yes", "no", "hi", "?"]))
    sampling = Sampling(max_new_tokens=60, stop_token_ids=ends, seed=5)

    def speak(contexts, **more):
        return engine.generate(contexts, sampling, **more)

    loop = ToolLoop(WORDS, tools_of(TOOLS), iterations=6, deadline=10.0, context_length=256)
    prompts = [[*PROMPT, 8 + row % 3] for row in range(24)]

    def rows(chosen):
        kwargs = [{}] * len(chosen)
        return loop.play([prompts[r] for r in chosen], speak, sampling, streams=chosen, template_kwargs=kwargs)

    whole = rows(range(24))
    some = [row for row in range(24) if row % 5 == 0 or whole[row].calls > 2]
    for row, again in zip(some, rows(some), strict=True):
        assert again.chains[0].ids == whole[row].chains[0].ids and again.messages == whole[row].messages
    several = [one for one in whole if sum(message["role"] == "assistant" for message in one.messages) > 2]
    assert len(several) >= 2
    for (chain,) in (one.chains for one in several):
        whole = torch.tensor([*chain.prompt, *chain.ids])
        with torch.no_grad():
            logps = model(whole[None]).logits[0].double().log_softmax(-1)
        logps = logps[torch.arange(len(whole) - 1), whole[1:]][len(chain.prompt) - 1 :]
        sampled, own = torch.tensor(chain.sampled), torch.tensor(chain.logps).double()
        torch.testing.assert_close(own[sampled], logps[sampled], rtol=0, atol=1e-5)
        assert not own[~sampled].any()


def test_a_process_that_is_done_goes_on_with_the_others():
    """Where all must generate together, it asks for nothing until the last of them is done."""
    others = iter([False, False, False, True])
    script = Script(["hi </s>"])
    loop = ToolLoop(WORDS, tools_of(TOOLS), iterations=None, deadline=5.0, context_length=None)
    sampling = Sampling(max_new_tokens=9, stop_token_ids=(END,))
    (found,) = loop.play(
        [[0, *PROMPT]],
        script,
        sampling,
        streams=[0],
        template_kwargs=[{}],
        all_done=lambda done: next(others) and done,
    )
    assert found.chains[0].ended and [len(asked) for asked in script.asked] == [1, 0, 0]
