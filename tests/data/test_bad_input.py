"""Bad input of every kind of rows: the error's class, and a message that names row, column and what to do."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from datasets import Dataset, IterableDataset
from tests.tiny_tokenizers import tiny_tokenizer

from trl.data.pipeline import prepare_dataset
from trl.data.preference import PreferencePreparation, RewardPreparation
from trl.data.stepwise import StepwisePreparation
from trl.data.text import SFTPreparation
from trl.data.unpaired import UnpairedPreparation

ASK = {"role": "user", "content": "And then?"}
HOW = {"role": "user", "content": "How?"}
UP = {"role": "assistant", "content": "Look up."}
NEXT = {"role": "assistant", "content": "Next."}
TALK = {"messages": [ASK, UP]}
TURN = {"prompt": [ASK], "completion": [UP]}
PAIR = {"prompt": "The sky is", "chosen": " blue", "rejected": " brown"}
CHATS = {"prompt": [ASK], "chosen": [UP], "rejected": [NEXT]}
TOKENS = {"prompt_input_ids": [5, 6], "chosen_input_ids": [7], "rejected_input_ids": [8, 9]}
LONG = [TOKENS, {**TOKENS, "prompt_input_ids": [5, 6, 7, 8, 9]}]
JUDGED: dict[str, Any] = {"prompt": "Q: Why?", "completion": " A: So.", "label": True}
SOLVED = {"prompt": "How many?", "completions": ["Seven.", "And 12."], "labels": [True, False]}
JUDGED_TOKENS = {"prompt_input_ids": [5], "completion_input_ids": [6], "label": True}
ONLY = {"assistant_only_loss": True}
NAN = float("nan")


class Bad(NamedTuple):
    """Rows that must be refused with `error`, whose message has `says`; special tokens and template of the tokenizer."""

    rows: list[dict[str, Any]]
    error: type[Exception]
    says: str
    settings: Mapping[str, Any] = MappingProxyType({})
    template: str = "chatml"
    special: Mapping[str, Any] = MappingProxyType({})


def says(*messages: Any) -> list[dict[str, Any]]:
    return [TALK, {"messages": list(messages)}]


def after(good: dict, **changes: Any) -> list[dict]:
    return [good, {**good, **changes}]


def judged(**changes: Any) -> list[dict]:
    return after(JUDGED, **changes)


SFT = {
    "no known column": Bad([{"question": "a", "answer": "b"}], ValueError, "row 0, has columns"),
    "text column of another name": Bad([{"text": "a"}], ValueError, "dataset_text_field", {"text_field": "body"}),
    "prompt only": Bad([{"prompt": "a"}], ValueError, "GRPOTrainer"),
    "completion only": Bad([{"completion": "a"}], ValueError, "add 'prompt'"),
    "preference": Bad([PAIR], ValueError, "DPOTrainer"),
    "no rows": Bad([], ValueError, "train dataset: no rows"),
    "None as text": Bad([{"text": "a"}, {"text": None}], ValueError, "row 1, column 'text'"),
    "number as text": Bad([{"text": 3}], TypeError, "row 0, column 'text': 3 is of type int"),
    "empty text": Bad([{"text": "a"}, {"text": ""}], ValueError, "row 1, column 'text'"),
    "empty completion": Bad([{"prompt": "a", "completion": ""}], ValueError, "row 0, column 'completion'"),
    "prompt text, completion messages": Bad([{"prompt": "a", "completion": [UP]}], TypeError, "row 0, column 'prompt'"),
    "prompt messages, completion text": Bad([{"prompt": [ASK], "completion": "b"}], TypeError, "row 0, column 'completion'"),
    "string as messages": Bad([{"messages": "Hello"}], TypeError, "row 0, column 'messages'"),
    "None as messages": Bad([TALK, {"messages": None}], ValueError, "row 1, column 'messages'"),
    "no messages": Bad(says(), ValueError, "row 1, column 'messages'"),
    "message that is text": Bad([{"messages": ["Hello"]}], TypeError, "row 0, column 'messages', message 0"),
    "no role": Bad(says({"content": "a"}), ValueError, "row 1, column 'messages', message 0"),
    "misspelt role": Bad(says(ASK, {"role": "assitant", "content": "a"}), ValueError, "Did you mean assistant?"),
    "unknown speaker": Bad([{"conversations": [{"from": "wizard", "value": "a"}]}], ValueError, "message 0: unknown role 'wizard'"),
    "None as content": Bad(says(ASK, {"role": "assistant", "content": None}), ValueError, "row 1, column 'messages', message 1"),
    "number as content": Bad([{"messages": [{"role": "user", "content": 3}]}], TypeError, "row 0, column 'messages', message 0"),
    "parts without a type": Bad([{"messages": [{"role": "user", "content": ["a"]}]}], TypeError, "row 0, column 'messages', message 0"),
    "tools that are not JSON": Bad([{**TALK, "tools": "{look}"}], ValueError, "row 0, column 'tools'"),
    "tools that are a number": Bad([{**TALK, "tools": 3}], TypeError, "row 0, column 'tools'"),
    "template kwargs that are text": Bad([{**TALK, "chat_template_kwargs": "a"}], TypeError, "row 0, column 'chat_template_kwargs'"),
    "no chat template": Bad([TALK], ValueError, "row 0, column 'messages'", template="none"),
    "no eos token": Bad([{"text": "a"}], ValueError, "row 0, column 'text'", special={"eos_token": None}),
    "unknown eos token": Bad([{"text": "a"}], ValueError, "eos_token '<|im_ends|>' is not in the", {"eos_token": "<|im_ends|>"}),
    "template that raises": Bad(says(ASK, ASK), ValueError, "row 1, column 'messages'", template="alternating"),
    "completion that changes its prompt": Bad(
        [{"prompt": [ASK, {**UP, "content": "<think>\na\n</think>\n\nb"}], "completion": [ASK, UP]}],
        ValueError, "row 0, column 'completion'", template="qwen3_like",
    ),
    "assistant only on text": Bad([{"text": "a"}], ValueError, "row 0, column 'text'", ONLY),
    "completion only on text": Bad([{"text": "a"}], ValueError, "row 0, column 'text'", {"completion_only_loss": True}),
    "completion only with a formatting function": Bad(
        [{"prompt": "a", "completion": "b"}], ValueError, "row 0, column 'text'",
        {"completion_only_loss": True, "formatting_func": lambda row: row["prompt"]},
    ),
    "formatting function that returns numbers": Bad([{"a": 1}], TypeError, "row 0, column 'text'", {"formatting_func": lambda row: 3}),
    "no assistant": Bad(says(ASK), ValueError, "row 1, column 'messages'", ONLY),
    "turn without a stop token": Bad([TALK], ValueError, "row 0, column 'messages'", ONLY, "no_stop"),
    "template that is not prefix-preserving": Bad([{"messages": [ASK, UP] * 2}], ValueError, "row 0, column 'messages'", ONLY, "qwen3_like"),
    "assistant mask all zero": Bad([TALK, TALK], ValueError, "row 0, column 'input_ids'", ONLY, "marked_nowhere"),
    "prompts longer than max_length": Bad([{"prompt": "How many apples?", "completion": " 7"}], ValueError, "rows are", {"max_length": 2}),
    "text as tokens": Bad([{"input_ids": "abc"}], TypeError, "row 0, column 'input_ids'"),
    "fractions as tokens": Bad([{"input_ids": [0.5]}], TypeError, "row 0, column 'input_ids'"),
    "no tokens": Bad([{"input_ids": [5, 6]}, {"input_ids": []}], ValueError, "row 1, column 'input_ids'"),
    "mask of another length": Bad(after({"input_ids": [5, 6], "completion_mask": [0, 1]}, completion_mask=[1]), ValueError, "row 1, column 'completion_mask'"),
    "labels of another length": Bad([{"input_ids": [5, 6], "labels": [5, 6, 7]}], ValueError, "row 0, column 'labels'"),
    "labels all masked": Bad([{"input_ids": [5, 6], "labels": [-100, -100]}], ValueError, "row 0, column 'input_ids'"),
    "unknown token": Bad([{"input_ids": [5, 6]}, {"input_ids": [5, 100_000]}], ValueError, "row 1, column 'input_ids'"),
    "unknown label": Bad([{"input_ids": [5, 6], "labels": [-100, 100000]}], ValueError, "row 0, column 'labels'"),
    "negative token": Bad([{"input_ids": [5, -1]}], ValueError, "token id -1"),
    "packing without a length": Bad([{"text": "a"}], ValueError, "packing=True with max_length=None", {"packing": True}),
    "mixed: number": Bad([{"text": "a"}, {"text": 3}], TypeError, "row 1, column 'text': 3 is of type int, expected a string. Write it in quotes in a .jsonl file"),
    "mixed: text and conversations": Bad([TURN, {"prompt": "a", "completion": "b"}], TypeError, "row 1, column 'prompt': 'a' is of type str"),
    "mixed: conversations and text": Bad([{"prompt": "a", "completion": "b"}, TURN], TypeError, "row 1, column 'prompt': a list"),
}  # fmt: skip
BOTH = {  # what pairs and reward models refuse
    "no rejected": Bad([{"prompt": "a", "chosen": "b"}], ValueError, "Rename the columns (--column_mapping OLD=NEW ..., or rows.rename_columns in Python), or add 'rejected'"),
    "completions": Bad([{"prompt": "a", "completion": "b"}], ValueError, "SFTTrainer"),
    "None": Bad(after(PAIR, chosen=None), ValueError, "row 1, column 'chosen'"),
    "empty completion": Bad(after(PAIR, rejected=""), ValueError, "row 1, column 'rejected'"),
    "empty messages": Bad(after(CHATS, chosen=[]), ValueError, "row 1, column 'chosen'"),
    "chosen text, rejected messages": Bad([{"chosen": "a", "rejected": [NEXT]}], TypeError, "row 0, column 'rejected'"),
    "chosen messages, rejected text": Bad([{"chosen": [ASK, UP], "rejected": "a"}], TypeError, "row 0, column 'rejected'"),
    "prompt messages, answers text": Bad([{**PAIR, "prompt": [ASK]}], TypeError, "row 0, column 'prompt'"),
    "mixed": Bad([PAIR, CHATS], TypeError, "row 1, column 'chosen'"),
    "mixed, messages first": Bad([CHATS, PAIR], TypeError, "row 1, column 'chosen'"),
    "prompt that is not of the conversation": Bad([{"prompt": "Where?", "chosen": [ASK, UP], "rejected": [ASK, NEXT]}], ValueError, "row 0, column 'prompt'"),
    "prompt messages that are no prefix": Bad([{"prompt": [HOW], "chosen": [ASK, UP], "rejected": [ASK, NEXT]}], ValueError, "row 0, column 'chosen', message 0"),
    "unknown role": Bad(after(CHATS, rejected=[{"role": "asistant", "content": "a"}]), ValueError, "row 1, column 'rejected', message 0"),
    "ends with the user": Bad(after(CHATS, chosen=[UP, ASK]), ValueError, "row 1, column 'chosen'"),
    "no chat template": Bad([CHATS], ValueError, "row 0, column 'chosen'", template="none"),
    "template that refuses": Bad([{**CHATS, "chosen": [UP, UP]}], ValueError, "row 0, column 'chosen'", template="alternating"),
    "tokens outside the tokenizer": Bad(after(TOKENS, chosen_input_ids=[7, 400]), ValueError, "row 1, column 'chosen_input_ids'"),
    "tokens outside the model": Bad([TOKENS], ValueError, "row 0, column 'rejected_input_ids'", {"vocab_size": 8}),
    "tokens of floats": Bad([{**TOKENS, "chosen_input_ids": [7.5]}], TypeError, "row 0, column 'chosen_input_ids'"),
    "no tokens": Bad(after(TOKENS, rejected_input_ids=[]), ValueError, "row 1, column 'rejected_input_ids'"),
    "text outside the model": Bad([PAIR], ValueError, "row 0, column 'chosen'", {"vocab_size": 390}),
}  # fmt: skip
PAIRS = {
    "tokens without a prompt": Bad([{"chosen_input_ids": [7], "rejected_input_ids": [8]}], ValueError, "add 'prompt_input_ids'"),
    "texts that share nothing": Bad([{"chosen": "Blue.", "rejected": "Brown."}, {"chosen": "Blue.", "rejected": "It is."}], ValueError, "row 1, column 'chosen'"),
    "conversations that share nothing": Bad([{"chosen": [ASK, UP], "rejected": [HOW, NEXT]}], ValueError, "row 0, column 'chosen'"),
    "conversations without a question": Bad([{"chosen": [UP], "rejected": [UP]}], ValueError, "row 0, column 'chosen'"),
    "conversations that part at the user": Bad([{"chosen": [ASK, UP, ASK, UP], "rejected": [ASK, UP, HOW, NEXT]}], ValueError, "row 0, column 'chosen'"),
    "no eos token": Bad([CHATS], ValueError, "row 0, column 'chosen'", special={"eos_token": None}),
    "no room": Bad(LONG, ValueError, "row 1, column 'prompt_input_ids'", {"max_length": 4, "max_prompt_length": 4, "truncation_mode": "keep_start"}),
    "no room, prompt first": Bad(LONG, ValueError, "row 1, column 'prompt_input_ids'", {"max_length": 4, "max_prompt_length": 6, "truncation_order": "prompt_first"}),
    "log-prob that is NaN": Bad([{**PAIR, "ref_chosen_logps": NAN, "ref_rejected_logps": -1.0}], ValueError, "row 0, column 'ref_chosen_logps'"),
    "log-prob that is text": Bad([{**PAIR, "ref_chosen_logps": -1.0, "ref_rejected_logps": "low"}], TypeError, "row 0, column 'ref_rejected_logps'"),
}  # fmt: skip
REWARDS = {
    "margin that is None": Bad(after({**PAIR, "margin": 1.0}, margin=None), ValueError, "row 1, column 'margin'"),
    "margin that is text": Bad([{**PAIR, "margin": "wide"}], TypeError, "row 0, column 'margin'"),
    "margin that is a truth value": Bad([{**PAIR, "margin": True}], TypeError, "row 0, column 'margin'"),
    "mask of another length": Bad([{"input_ids_chosen": [7, 6], "attention_mask_chosen": [1], "input_ids_rejected": [8]}], ValueError, "row 0, column 'attention_mask_chosen'"),
    "mask of zeros": Bad([{"input_ids_chosen": [7, 6], "attention_mask_chosen": [0, 0], "input_ids_rejected": [8]}], ValueError, "row 0, column 'input_ids_chosen'"),
}  # fmt: skip
UNPAIRED = {
    "label 1": Bad(judged(label=1)[1:], TypeError, "row 0, column 'label': 1 is of type int, expected true or false. Write true or false in a .jsonl file; in Python, bool()"),
    "label 2": Bad(judged(label=2)[1:], TypeError, "column 'label': 2 is of type int, expected true or false. Map it to True"),
    "label missing in a row": Bad(judged(label=None), ValueError, "train dataset, row 1, column 'label': None, expected true or false"),
    "no label": Bad([{"prompt": "a", "completion": "b"}], ValueError, "add 'label'"),
    "no completion": Bad([{"prompt": "a", "label": True}], ValueError, "add 'completion'"),
    "steps": Bad([{"prompt": "a", "completions": ["b"], "labels": [True]}], ValueError, "train with PRMTrainer"),
    "an answer that begins with a question": Bad([{**TURN, "completion": [ASK, UP], "label": True}], ValueError, "row 0, column 'completion', message 0: role 'user'"),
    "messages behind text": Bad([{**JUDGED, "completion": [UP]}], TypeError, "row 0, column 'prompt': 'Q: Why?' is of type str"),
    "mixed": Bad([JUDGED, {**TURN, "label": True}], TypeError, "row 1, column 'prompt'"),
    "pairs that share no prompt": Bad([{"chosen": "a", "rejected": "b"}], ValueError, "row 0, column 'chosen'"),
    "tokens without label": Bad([{"prompt_input_ids": [5], "completion_input_ids": [6]}], ValueError, "add 'label'"),
    "tokens with a number as label": Bad([{**JUDGED_TOKENS, "label": 0}], TypeError, "row 0, column 'label': 0 is of type int"),
    "no tokens": Bad(after(JUDGED_TOKENS, completion_input_ids=[]), ValueError, "row 1, column 'completion_input_ids': an empty list"),
    "unknown token": Bad([{**JUDGED_TOKENS, "prompt_input_ids": [9999]}], ValueError, "row 0, column 'prompt_input_ids': token id 9999"),
    "tokens to be embedded": Bad([JUDGED_TOKENS], ValueError, "add 'embedding_input_ids'", {"embedding_tokenizer": tiny_tokenizer()}),
    "a number that is none": Bad([{**JUDGED, "reference_logps": NAN}], ValueError, "row 0, column 'reference_logps': nan"),
    "no room": Bad([JUDGED], ValueError, "max_prompt_length 8 leaves no token", {"max_length": 8, "max_prompt_length": 8}),
    "no eos token": Bad([JUDGED], ValueError, "row 0, column 'completion'", special={"eos_token": None}),
    "no chat template": Bad([{**TURN, "label": True}], ValueError, "row 0, column 'completion'", template="none"),
}  # fmt: skip

STEPS = {
    "labels of another number": Bad(after(SOLVED, labels=[True]), ValueError, "train dataset, row 1, column 'labels': 1 labels for 2 steps"),
    "labels that are numbers": Bad([{**SOLVED, "labels": [1, 0]}], TypeError, "row 0, column 'labels[0]': 1 is of type int, expected true or false. Write true or false"),
    "a label that is missing": Bad([{**SOLVED, "labels": [True, None]}], ValueError, "row 0, column 'labels[1]': None"),
    "one label": Bad([{**SOLVED, "labels": True}], TypeError, "row 0, column 'labels': True is of type bool, expected a list"),
    "no steps": Bad([{**SOLVED, "completions": [], "labels": []}], ValueError, "row 0, column 'completions': an empty list"),
    "an empty step": Bad([{**SOLVED, "completions": ["a", ""]}], ValueError, "row 0, column 'completions[1]': an empty string"),
    "steps in one text": Bad([{**SOLVED, "completions": "a"}], TypeError, "row 0, column 'completions': 'a' is of type str, expected a list of steps"),
    "steps that are messages": Bad([{**SOLVED, "completions": [[UP]] * 2}], TypeError, "row 0, column 'completions[0]': a list"),
    "no prompt": Bad([{**SOLVED, "prompt": ""}], ValueError, "row 0, column 'prompt': an empty string"),
    "no labels": Bad([{"prompt": "a", "completions": ["b"]}], ValueError, "add 'labels'"),
    "one completion": Bad([{"prompt": "a", "completion": "b", "label": True}], ValueError, "add 'completions'"),
    "nothing left": Bad([SOLVED], ValueError, "none of the row's", {"max_length": 3}),
    "separator without tokens": Bad([SOLVED], ValueError, "step_separator ''", {"step_separator": ""}),
    "unknown token": Bad([{"input_ids": [5, 9999], "labels": [-100, 1]}], ValueError, "token id 9999, expected 0 to"),
    "token labels of another length": Bad([{"input_ids": [5, 6], "labels": [1]}], ValueError, "row 0, column 'labels': 1 labels for 2 tokens"),
    "token labels that are no classes": Bad([{"input_ids": [5, 6], "labels": [-1, 1]}], ValueError, "row 0, column 'labels': -1, expected a class"),
}  # fmt: skip

KINDS: dict[str, tuple[Any, Any, dict[str, Bad]]] = {
    "sft": (prepare_dataset, SFTPreparation, SFT),
    "pairs": (prepare_dataset, PreferencePreparation, {**BOTH, **PAIRS}),
    "reward": (prepare_dataset, RewardPreparation, {**BOTH, **REWARDS}),
    "unpaired": (prepare_dataset, UnpairedPreparation, UNPAIRED),
    "steps": (prepare_dataset, StepwisePreparation, STEPS),
}
CASES = {f"{kind}: {name}": (kind, case) for kind, (_, _, cases) in KINDS.items() for name, case in cases.items()}  # fmt: skip


@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "stream"])
@pytest.mark.parametrize(("kind", "case"), CASES.values(), ids=CASES)
def test_bad_rows_are_refused_before_the_first_step(kind: str, case: Bad, streaming: bool) -> None:
    dataset: Any = None
    try:
        dataset = Dataset.from_list(case.rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        streaming = True  # only a stream can hold rows of two formats
    if streaming:
        dataset = IterableDataset.from_generator(lambda: iter(case.rows))
    prepare, settings, _ = KINDS[kind]
    with pytest.raises(case.error) as caught:
        prepare(dataset, tiny_tokenizer(case.template, **case.special), settings(**case.settings))
    assert type(caught.value) is case.error
    assert case.says in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (SFTPreparation, {"untrained_rows": "ignore"}),
        (PreferencePreparation, {"max_length": 0}),
        (PreferencePreparation, {"max_prompt_length": 0}),
        (PreferencePreparation, {"max_completion_length": -1}),
        (PreferencePreparation, {"truncation_mode": "keep_middle"}),
        (PreferencePreparation, {"truncation_order": "none"}),
        (PreferencePreparation, {"untrained_rows": "report"}),
        (UnpairedPreparation, {"max_length": 2}),
        (StepwisePreparation, {"max_prompt_length": 0}),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, given: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        settings(**given)
    with pytest.raises(ValueError, match="per_device_train_batch_size must be at least 2 for loss_type='kto'"):
        UnpairedPreparation(mismatch_group=1)


def test_a_bad_row_further_down_a_stream_is_named_when_it_passes() -> None:
    dataset = Dataset.from_list([PAIR] * 500 + [{**PAIR, "chosen": ""}]).to_iterable_dataset()
    stream, _ = prepare_dataset(dataset, tiny_tokenizer(), PreferencePreparation(), name="eval")
    with pytest.raises(ValueError, match="eval dataset, row 500, column 'chosen': an empty string"):
        list(stream)


def test_roles_that_the_template_knows_are_accepted() -> None:
    rows = Dataset.from_list([{"messages": [{"role": "narrator", "content": "Once."}, UP]}])
    assert len(prepare_dataset(rows, tiny_tokenizer("marked_nowhere"), SFTPreparation())[0]) == 1
    with pytest.raises(ValueError, match="unknown role 'narrator'"):
        prepare_dataset(rows, tiny_tokenizer(), SFTPreparation())


def test_nones_that_storage_added_are_no_errors() -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"where": "up"}}}],
    }
    rows = [{"messages": [ASK, call, {"role": "tool", "content": "blue"}, UP]}, TALK]
    prepared, _ = prepare_dataset(Dataset.from_list(rows), tiny_tokenizer("qwen3_like"), SFTPreparation())
    texts = "".join(tiny_tokenizer().decode(ids) for ids in prepared["input_ids"])
    assert '"arguments": {"where": "up"}' in texts
    assert "None" not in texts and "null" not in texts
