"""Trained-token masks of conversations: marked, derived, and refused where they cannot be proven right."""

import pytest
from tests.golden.runs import Assets
from tests.tiny_tokenizers import TEMPLATES, tiny_tokenizer

from trl.data.rendering import Chat, TemplateRefusal
from trl.data.spans import assistant_tokens, token_boundaries
from trl.data.templates import get_training_chat_template
from trl.data.tokenization import encode

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What colour is the sky?"},
    {"role": "assistant", "content": "It is blue."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Look up."},
]


def trained_text(template: str, messages: list[dict], **special: str | None) -> str:
    """The trained tokens of a conversation, decoded, untrained stretches as `|`."""
    tokenizer = tiny_tokenizer(template, **special)
    tokens = assistant_tokens(tokenizer, Chat(messages))
    assert len(tokens.mask) == len(tokens.input_ids)
    kept = [tokenizer.decode([i]) if m else "\0" for i, m in zip(tokens.input_ids, tokens.mask, strict=True)]
    return "|".join(part for part in "".join(kept).split("\0") if part)


@pytest.mark.parametrize("template", ["chatml", "marked", "begin", "stop_in_next"])
def test_turns_are_trained_with_their_stop_token_and_nothing_else(template: str) -> None:
    assert trained_text(template, TALK, pad_token="<|im_end|>") == "It is blue.<|im_end|>|Look up.<|im_end|>"
    assert trained_text("chatml", TALK[2:]) == "It is blue.<|im_end|>|Look up.<|im_end|>"
    assert trained_text("other_stop", TALK) == "It is blue.<|stop|>|Look up.<|stop|>"


def test_stop_token_in_the_next_message_is_added_after_the_last() -> None:
    tokenizer = tiny_tokenizer("stop_in_next")
    tokens = assistant_tokens(tokenizer, Chat(TALK))
    rendered = encode(tokenizer, [tokenizer.apply_chat_template(TALK, tokenize=False)])[0]  # type: ignore[list-item]
    assert tokens.input_ids == [*rendered, tokenizer.eos_token_id]
    unfinished = assistant_tokens(tokenizer, Chat(TALK[:4]))
    assert unfinished.input_ids[-1] != tokenizer.eos_token_id


def test_marked_and_derived_masks_agree_on_the_recorded_conversations() -> None:
    assets = Assets()
    plain, marked = assets.tokenizer("tok"), assets.tokenizer("tok_gen")
    for name in ("lm_messages", "lm_multiturn"):
        for row in assets.rows(name):
            messages = row["messages"]
            derived = assistant_tokens(plain, Chat(messages))
            theirs = marked.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
            assert derived == assistant_tokens(marked, Chat(messages))
            assert (derived.input_ids, derived.mask) == (theirs["input_ids"], theirs["assistant_masks"])


def test_marked_and_derived_masks_agree_on_awkward_text() -> None:
    awkward = [
        "  two spaces",
        "ünïcode — 東京 🙂",
        "trailing space ",
        "a\n\nb\n",
        "12345",
        "<think>\nx\n</think>\ny",
    ]
    for answer in awkward:
        messages = [*TALK[1:2], {"role": "assistant", "content": answer}, *TALK[3:]]
        derived = assistant_tokens(tiny_tokenizer("chatml"), Chat(messages))
        assert derived == assistant_tokens(tiny_tokenizer("marked"), Chat(messages))
        assert derived.unstopped == derived.shifted == 0


def test_a_stop_token_right_behind_the_mark_is_trained() -> None:
    tokens = assistant_tokens(tiny_tokenizer("marked_without_stop"), Chat(TALK))
    assert tokens == assistant_tokens(tiny_tokenizer("marked"), Chat(TALK))
    assert trained_text("marked_without_stop", TALK) == "It is blue.<|im_end|>|Look up.<|im_end|>"


def test_marked_turns_without_any_stop_token_are_counted() -> None:
    # Nothing but a line break stands between the mark and the next turn.
    tokens = assistant_tokens(tiny_tokenizer("marked_stopless"), Chat(TALK))
    assert tokens.unstopped == 2
    assert trained_text("marked_stopless", TALK) == "It is blue.|Look up."


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("no_stop", "no stop token closes it"),
        ("no_generation_prompt", "no generation prompt"),
        ("opens_thought", "does not continue the generation prompt"),
        ("qwen3_like", "renders it differently once more messages follow"),
    ],
)
def test_what_cannot_be_proven_is_refused(template: str, reason: str) -> None:
    with pytest.raises(TemplateRefusal, match=f"message 2: .*{reason}"):
        assistant_tokens(tiny_tokenizer(template), Chat(TALK))


def test_a_start_inside_a_token_is_refused_when_derived_and_trained_when_marked() -> None:
    # "assistant\n" + "\nBlue": make the two line breaks one token, as the vocabularies of large models do.
    merged = tiny_tokenizer("chatml")
    merged.add_tokens(["\n\n"])
    messages = [*TALK[:2], {"role": "assistant", "content": "\nBlue."}]
    with pytest.raises(TemplateRefusal, match=r"message 2: .*start falls inside a token.*prompt-completion"):
        assistant_tokens(merged, Chat(messages))
    merged.chat_template = TEMPLATES["marked"]
    tokens = assistant_tokens(merged, Chat(messages))
    kept = [i for i, m in zip(tokens.input_ids, tokens.mask, strict=True) if m]
    assert merged.decode(kept) == "\n\nBlue.<|im_end|>"
    assert tokens.shifted == 1


EMPTY = "<think>\n\n</think>\n\n"
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}
CALLS = [{"type": "function", "function": {"name": "look", "arguments": {"where": place}}} for place in ("up", "down")]
CALLED = [
    f'<tool_call>\n{{"name": "look", "arguments": {{"where": "{place}"}}}}\n</tool_call>' for place in ("up", "down")
]
RESULTS = [{"role": "tool", "name": "look", "content": text} for text in ("blue", "green")]
ASKED = "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
ANSWERED = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QUESTION, ANSWER = TALK[3], TALK[4]
# Conversations, with the text that Qwen3's template has to give them in training: what is trained at odd places.
QWEN3_TALKS: dict[str, tuple[list[dict], list[str]]] = {
    "turns": ([QUESTION, ANSWER, QUESTION, ANSWER], [ASKED, EMPTY + "Look up.<|im_end|>", "\n" + ASKED, EMPTY + "Look up.<|im_end|>", "\n"]),
    "reasoning": (
        [QUESTION, {**ANSWER, "reasoning_content": "Hm."}, QUESTION, {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nLook up."}],
        [ASKED, "<think>\nHm.\n</think>\n\nLook up.<|im_end|>", "\n" + ASKED, "<think>\nSo.\n</think>\n\nLook up.<|im_end|>", "\n"],
    ),
    "a call without a thought": (
        [QUESTION, {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}, RESULTS[0], ANSWER],
        [ASKED, EMPTY + CALLED[0] + "<|im_end|>", ANSWERED.format("blue"), EMPTY + "Look up.<|im_end|>", "\n"],
    ),
    "two calls, two results, another call": (
        [
            QUESTION, {"role": "assistant", "content": "See.", "reasoning_content": "Hm.", "tool_calls": CALLS}, *RESULTS,
            {"role": "assistant", "content": "", "tool_calls": CALLS[1:]}, RESULTS[1], {**ANSWER, "reasoning_content": "So."}, QUESTION, ANSWER,
        ],
        [
            ASKED, "<think>\nHm.\n</think>\n\nSee.\n" + "\n".join(CALLED) + "<|im_end|>",
            ANSWERED.format("blue\n</tool_response>\n<tool_response>\ngreen"), EMPTY + CALLED[1] + "<|im_end|>",
            ANSWERED.format("green"), "<think>\nSo.\n</think>\n\nLook up.<|im_end|>", "\n" + ASKED, EMPTY + "Look up.<|im_end|>", "\n",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "pieces"), QWEN3_TALKS.values(), ids=QWEN3_TALKS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_qwen3_conversations_token_by_token(messages: list[dict], pieces: list[str], tools: list | None) -> None:
    tokenizer = tiny_tokenizer("qwen3_like")
    own = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    head = own[: own.index("<|im_start|>user")]  # system message and tools, as Qwen3 itself writes them
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    tokens = assistant_tokens(tokenizer, Chat(messages, tools))
    found = list(zip(tokens.input_ids, tokens.mask, strict=True))
    expected = [
        (token, number % 2)
        for number, ids in enumerate(encode(tokenizer, [head + pieces[0], *pieces[1:]]))
        for token in ids
    ]
    assert found == expected
    assert ("# Tools" in head) == bool(tools)


def test_boundaries_are_token_counts_or_none() -> None:
    tokenizer = tiny_tokenizer()
    text = "It is blue."
    ids, counts = token_boundaries(tokenizer, text, [2, 5, len(text)])
    assert ids == encode(tokenizer, [text])[0]
    for cut, count in zip([2, 5, len(text)], counts, strict=True):
        assert count is not None
        assert tokenizer.decode(ids[:count]) == text[:cut]
    whole = tiny_tokenizer()
    whole.add_tokens(["blue"])
    assert token_boundaries(whole, text, [2, 8, 10])[1][1:] == [
        None,
        len(token_boundaries(whole, text, [])[0]) - 1,
    ]
