import warnings

import pytest
from tests.words import word_tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from trl.collators.completion_only import DataCollatorForCompletionOnlyLM


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def trained_words(tokenizer, collate, *texts: str, dim: int | None = None) -> list[str]:
    batch = collate([{"input_ids": tokenizer(text)["input_ids"]} for text in texts])
    return [" ".join(tokenizer.convert_ids_to_tokens(row[row != -100].tolist())) for row in batch["labels"]]


@pytest.mark.parametrize("template", ["bot:", [15]])
def test_everything_after_the_last_response_template(tokenizer, template):
    assert tokenizer.convert_tokens_to_ids("bot:") == 15
    collate = DataCollatorForCompletionOnlyLM(template, tokenizer=tokenizer, mlm=False)
    texts = ["user: hi bot: yes </s>", "user: a bot: b user: c bot: d e </s>"]
    assert trained_words(tokenizer, collate, *texts) == ["yes </s>", "d e </s>"]


def test_every_answer_with_an_instruction_template(tokenizer):
    collate = DataCollatorForCompletionOnlyLM(
        instruction_template="user:", response_template="bot:", tokenizer=tokenizer
    )
    texts = [
        "user: a bot: b </s> user: c bot: d e",
        "user: a bot: b bot: c user: d",
        "no user: a bot: user: b bot: c",
    ]
    assert trained_words(tokenizer, collate, *texts) == ["b </s> d e", "b c", "c"]


def test_lists_of_ids_on_the_left():
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "left"
    batch = DataCollatorForCompletionOnlyLM("bot:", tokenizer=tokenizer).torch_call([[7, 15, 8, 3], [15, 9]])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[7, 15, 8, 3], [0, 0, 15, 9]],
        "attention_mask": [[1, 1, 1, 1], [0, 0, 1, 1]],
        "labels": [[-100, -100, 8, 3], [-100, -100, -100, 9]],
    }


def test_a_pad_token_is_needed_where_rows_are_padded():
    tokenizer = word_tokenizer(pad_token=None)
    collate = DataCollatorForCompletionOnlyLM("bot:", tokenizer=tokenizer)
    assert collate([[7, 15, 8], [15, 9, 3]])["labels"].tolist() == [[-100, -100, 8], [-100, 9, 3]]
    with pytest.raises(ValueError, match="rows of 2 to 3 tokens need"):
        collate([[7, 15, 8], [15, 9]])
    multiple = DataCollatorForCompletionOnlyLM("bot:", tokenizer=tokenizer, pad_to_multiple_of=4)
    with pytest.raises(ValueError, match="pad_token"):
        multiple([[7, 15, 8]])
    tokenizer.pad_token = "</s>"
    assert collate([[7, 15, 8], [15, 9]])["labels"].tolist() == [[-100, -100, 8], [-100, 9, -100]]


def test_padding_free(tokenizer):
    collate = DataCollatorForCompletionOnlyLM("bot:", tokenizer=tokenizer, padding_free=True)
    batch = collate([{"input_ids": [7, 15, 8, 3]}, {"input_ids": [15, 9]}])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[7, 15, 8, 3, 15, 9]],
        "position_ids": [[0, 1, 2, 3, 0, 1]],
        "labels": [[-100, -100, 8, 3, -100, 9]],
    }


def test_the_end_token_is_trained_when_it_is_the_pad_token():
    tokenizer = word_tokenizer(pad_token="</s>")
    batch = DataCollatorForCompletionOnlyLM("bot:", tokenizer=tokenizer)(
        [{"input_ids": [15, 8, 3]}, {"input_ids": [15, 3]}]
    )
    assert batch["labels"].tolist() == [[-100, 8, 3], [-100, 3, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_rows_without_a_template_are_masked_and_counted(tokenizer):
    collate = DataCollatorForCompletionOnlyLM("bot:", "user:", tokenizer=tokenizer)
    texts = ["user: a b", "bot: a b", "user: a bot: b"]
    with pytest.warns(UserWarning, match="2 of 3 rows without"):
        assert trained_words(tokenizer, collate, *texts) == ["", "", "b"]
    with pytest.warns(UserWarning, match="1 of 1 rows without"):
        trained_words(tokenizer, collate, "a")
    assert collate.rows_without_template == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained_words(tokenizer, collate, texts[2])


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, of which "\\n#" , "a:" and ": " stick together when they meet."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    names = ["<pad>", "</s>", *characters, "\n#", "a:", ": "]
    model = BPE({name: index for index, name in enumerate(names)}, [("\n", "#"), ("a", ":"), (":", " ")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="</s>", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def test_text_that_tokenizes_differently_in_context():
    tokenizer = merging_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("x\n#B y")["input_ids"]) == ["x", "\n#", "B", " ", "y"]
    collate = DataCollatorForCompletionOnlyLM("#B:", "#A:", tokenizer=tokenizer)
    text = "#A:x\n#B:yes\n#A:z\n#B:no"

    def trained(text: str) -> str:
        labels = collate([{"input_ids": tokenizer(text)["input_ids"]}])["labels"][0]
        return "".join(tokenizer.convert_ids_to_tokens(labels[labels != -100].tolist()))

    assert trained(text) == "yesno"  # "\n#" holds a character of the next template, so it belongs to that
    assert trained("#A:x\n#B: yes") == "yes"  # ": " begins in the template


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mlm": True}, "mlm must be False"),
        ({"response_template": ""}, "response_template must have at least one token"),
        ({"instruction_template": []}, r"instruction_template must have"),
    ],
)
def test_wrong_arguments(tokenizer, arguments, message: str):
    with pytest.raises(ValueError, match=message):
        DataCollatorForCompletionOnlyLM(**{"response_template": "bot:", "tokenizer": tokenizer, **arguments})
