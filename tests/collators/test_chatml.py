import pytest
from tests.words import CHAT_TEMPLATE, word_tokenizer

from trl.collators.chatml import DataCollatorForChatML


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(chat_template=CHAT_TEMPLATE)


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def test_batch_by_hand(tokenizer):
    batch = DataCollatorForChatML(tokenizer)([{"messages": chat("hi", "yes no")}, {"messages": chat("a b c", "d")}])
    user, bot, end, hi, yes, no, a, b, c, d = tokenizer.convert_tokens_to_ids(
        ["<user>", "<assistant>", "</s>", "hi", "yes", "no", "a", "b", "c", "d"]
    )
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[0, user, hi, end, bot, yes, no, end], [user, a, b, c, end, bot, d, end]],
        "attention_mask": [[0] + [1] * 7, [1] * 8],
        "labels": [[-100] * 5 + [yes, no, end], [-100] * 6 + [d, end]],
        "prompts": [[0, 0, user, hi, end, bot], [user, a, b, c, end, bot]],
        "prompt_attention_mask": [[0, 0, 1, 1, 1, 1], [1] * 6],
    }


def test_only_the_last_answer_is_trained(tokenizer):
    batch = DataCollatorForChatML(tokenizer, ignore_index=-7)([{"messages": chat("hi", "yes", "a", "no")}])
    labels = batch["labels"][0]
    assert tokenizer.convert_ids_to_tokens(labels[labels != -7].tolist()) == ["no", "</s>"]


def test_the_end_token_is_trained_when_it_is_the_pad_token():
    tokenizer = word_tokenizer(pad_token="</s>", chat_template=CHAT_TEMPLATE)
    batch = DataCollatorForChatML(tokenizer)([{"messages": chat("hi", "yes")}, {"messages": chat("a b", "no")}])
    assert batch["labels"][:, -1].tolist() == [3, 3]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1], [1] * 7]


def test_rows_that_bring_their_tokens_and_prompt(tokenizer):
    collate = DataCollatorForChatML(tokenizer, prompt_key="question", messages_key="chat")
    expected = collate([{"chat": chat("hi", "yes")}])
    ids = expected["input_ids"][0].tolist()
    prompt = "<user> hi </s> <assistant> "
    for row in ({"input_ids": ids, "question": prompt}, {"chat": chat("hi", "yes"), "question": prompt}):
        batch = collate([row])
        assert all(batch[name].tolist() == expected[name].tolist() for name in expected)
    with pytest.raises(ValueError, match="do not begin with 'question', 'no"):
        collate([{"input_ids": ids, "question": "no"}])


def test_long_rows_lose_their_end_and_untrained_ones_are_counted(tokenizer):
    collate = DataCollatorForChatML(tokenizer, max_length=5)
    batch = collate([{"messages": chat("hi", "yes no")}])
    assert batch["input_ids"].shape == (1, 5)
    assert (batch["labels"] != -100).sum() == 1
    with pytest.warns(UserWarning, match="1 of 2 rows have prompts of max_length"):
        batch = collate([{"messages": chat("hi", "yes")}, {"messages": chat("a b c d", "yes")}])
    assert (batch["labels"][1] == -100).all()
    assert batch["prompts"].shape == (2, 5)


@pytest.mark.parametrize(
    "messages", [None, "hi", [], chat("hi"), chat("hi", "yes", "no"), [{"role": "assistant", "content": "x"}]]
)
def test_conversations_without_an_answer(tokenizer, messages):
    with pytest.raises(ValueError, match=r"row 1 of the batch: 'messages' is .*messages_key"):
        DataCollatorForChatML(tokenizer)([{"messages": chat("hi", "yes")}, {"messages": messages}])


def test_a_template_that_refuses():
    tokenizer = word_tokenizer(chat_template="{{ raise_exception('no users') }}")
    with pytest.raises(ValueError, match=r"row 0 of the batch, column 'messages': .*no users"):
        DataCollatorForChatML(tokenizer)([{"messages": chat("hi", "yes")}])


def test_wrong_arguments(tokenizer):
    with pytest.raises(ValueError, match="no pad token"):
        DataCollatorForChatML(word_tokenizer(pad_token=None))
    with pytest.raises(ValueError, match="max_length must be >= 1, got 0"):
        DataCollatorForChatML(tokenizer, max_length=0)
