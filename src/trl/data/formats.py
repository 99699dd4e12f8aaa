"""Dataset types and formats, row by row: what a row is, and how one form becomes another.

A row is *standard* (its text columns are strings) or *conversational* (they are lists of `{"role", "content"}`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

DatasetType = TypeVar("DatasetType", Dataset, DatasetDict, IterableDataset, IterableDatasetDict)
StoredOrStream = Dataset | IterableDataset
Row = Mapping[str, Any]
"""A row of a data set: its values by column."""
RowDict = dict[str, Any]
"""A row that is made here."""
TListOrMapping = TypeVar("TListOrMapping", list, Mapping)

CONVERSATIONAL_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
IMAGE_COLUMNS = ("images", "image")

# How conversations in the `from`/`value` style name their speakers.
SPEAKER_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "bot", "chatgpt", "assistant"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
    "system": "system",
}


def is_list_of_dicts_with(value: object, *keys: str) -> bool:
    """Whether `value` is a non-empty list whose first item is a dict that has all `keys`.

    >>> is_list_of_dicts_with([{"role": "user"}], "role"), is_list_of_dicts_with("text", "role")
    (True, False)
    """
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], Mapping):
        return False
    return all(key in value[0] for key in keys)


def is_conversational(example: Row) -> bool:
    """Whether one of the text columns of a row holds messages with a `role`.

    >>> is_conversational({"prompt": [{"role": "user", "content": "What colour is the sky?"}]})
    True
    >>> is_conversational({"prompt": "The sky is"})
    False
    """
    return any(is_list_of_dicts_with(example.get(key), "role") for key in CONVERSATIONAL_COLUMNS)


def is_conversational_from_value(example: Row) -> bool:
    """Whether a row has a `conversations` column of `{"from", "value"}` messages.

    >>> is_conversational_from_value({"conversations": [{"from": "human", "value": "Hello"}]})
    True
    """
    return is_list_of_dicts_with(example.get("conversations"), "from", "value")


def maybe_convert_to_chatml(example: dict[str, list]) -> dict[str, list]:
    """The row with `from`/`value` messages turned into `role`/`content` and `conversations` renamed to `messages`.

    Speakers of the ShareGPT style get the roles of templates (`human` -> `user`). Rows of another form stay.

    >>> maybe_convert_to_chatml({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]})
    {'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}]}
    """
    converted = dict(example)
    for key in (*CONVERSATIONAL_COLUMNS, "conversations"):
        value = converted.get(key)
        if not (isinstance(value, list) and value and isinstance(value[0], Mapping)):
            continue
        converted[key] = messages = list(value)
        for index, message in enumerate(messages):
            if isinstance(message, Mapping) and ("from" in message or "value" in message):
                renamed = {{"from": "role", "value": "content"}.get(name, name): part for name, part in message.items()}
                role = renamed.get("role")
                messages[index] = {**renamed, "role": SPEAKER_ROLES.get(role, role) if isinstance(role, str) else role}
    if "conversations" in converted and "messages" not in converted:
        return {("messages" if key == "conversations" else key): value for key, value in converted.items()}
    return converted


def remove_none_values(example: Any) -> Any:
    """`example` without the keys of dicts whose value is None, at every depth; lists keep their length.

    Arrow tables give every dict of a column the keys of all others, filled with None. What is `written` stays.

    >>> remove_none_values([{"role": "user", "content": "Hi", "tool_calls": None}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(example, Written):
        return example
    if isinstance(example, Mapping):
        return {key: remove_none_values(item) for key, item in example.items() if item is not None}
    if isinstance(example, list | tuple):
        return [remove_none_values(item) for item in example]
    return example


class Written(dict):
    """A dict that no storage added a key to: its None are the user's."""


def written(value: Any, kind: Any = None) -> Any:
    """A value whose dicts are `Written`; of a column of the type `kind` only those that it stores as JSON.

    >>> remove_none_values([{"name": "look", "default": None}, written({"name": "look", "default": None})])
    [{'name': 'look'}, {'name': 'look', 'default': None}]
    """
    if isinstance(kind, Mapping) and isinstance(value, Mapping):
        return {key: written(item, kind.get(key, False)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [written(item, getattr(kind, "feature", kind)) for item in value]
    is_json = kind is None or type(kind).__name__ == "Json"  # a type of datasets 4.7 and later
    return Written(value) if is_json and isinstance(value, Mapping) else value


def common_prefix_length(left: Sequence, right: Sequence) -> int:
    """The number of leading items that two sequences (strings, token ids, messages) share.

    >>> common_prefix_length("the sky is blue", "the sky is grey")
    11
    """
    shared, most = 0, min(len(left), len(right))
    end = most
    while shared < most:  # bisection by slices, which are compared at the speed of C
        if left[shared:end] == right[shared:end]:
            shared = end
        else:
            most = end - 1
        end = (shared + most + 1) // 2
    return shared


def extract_prompt(example: dict[str, Sequence]) -> dict[str, Sequence]:
    """Split the shared beginning of `chosen` and `rejected` off as `prompt`.

    A space before the point where two strings part belongs to the completions. Where one side continues the other, the
    shorter one keeps an empty completion.

    >>> extract_prompt({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    {'prompt': 'The sky is', 'chosen': ' blue.', 'rejected': ' green.'}
    """
    chosen, rejected = example["chosen"], example["rejected"]
    split = common_prefix_length(chosen, rejected)
    parted = split < min(len(chosen), len(rejected))
    if parted and split > 0 and isinstance(chosen, str) and chosen[split - 1] == " ":
        split -= 1
    return {"prompt": chosen[:split], "chosen": chosen[split:], "rejected": rejected[split:]}


def maybe_extract_prompt(example: dict[str, list]) -> dict[str, list]:
    """The row with an explicit prompt: as it is, or with the prompt taken out of `chosen` and `rejected`.

    A prompt of another format than the answers (a string beside messages) is replaced by what the answers share.
    """
    if "chosen" not in example or "rejected" not in example:
        return example
    if "prompt" in example:
        conversational = [is_conversational({key: example[key]}) for key in ("prompt", "chosen")]
        if conversational[0] == conversational[1]:
            return example
    return {**example, **extract_prompt({key: example[key] for key in ("chosen", "rejected")})}  # type: ignore[dict-item]


def unpair_rows(batch: dict[str, list]) -> dict[str, list]:
    """A batch of preference rows as twice as many rows with `completion` and `label`: all chosen, then all rejected."""
    rows = len(batch["chosen"])
    others = {key: values + values for key, values in batch.items() if key not in ("chosen", "rejected")}
    return {**others, "completion": batch["chosen"] + batch["rejected"], "label": [True] * rows + [False] * rows}


def unpair_preference_dataset(
    dataset: DatasetType, num_proc: int | None = None, desc: str | None = None
) -> DatasetType:
    """A preference data set as an unpaired one: `chosen` with label True, `rejected` with label False.

    >>> paired = Dataset.from_dict({"prompt": ["The sky is"], "chosen": [" blue."], "rejected": [" green."]})
    >>> unpair_preference_dataset(paired)[1]
    {'prompt': 'The sky is', 'completion': ' green.', 'label': False}
    """
    map_kwargs: RowDict = {"batched": True, "remove_columns": ["chosen", "rejected"]}
    if isinstance(dataset, Dataset | DatasetDict):
        map_kwargs |= {"num_proc": num_proc, "desc": desc}
    return dataset.map(unpair_rows, **map_kwargs)  # type: ignore[return-value]


def maybe_unpair_preference_dataset(
    dataset: DatasetType, num_proc: int | None = None, desc: str | None = None
) -> DatasetType:
    """`unpair_preference_dataset` where the data set has `chosen` and `rejected`; otherwise the data set as it is."""
    first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    if {"chosen", "rejected"} <= set(column_names(first)):
        return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)
    return dataset


def column_names(dataset: StoredOrStream) -> list[str]:
    """The columns of a data set; a streaming one that does not know them is asked for its first row."""
    if dataset.column_names is not None:
        return list(dataset.column_names)
    return list(next(iter(dataset), {}))


def image_column(columns: Sequence[str]) -> str | None:
    """The column that holds images, or None. Raises: ValueError where there are two.

    >>> image_column(["messages", "images"])
    'images'
    """
    image_columns = [column for column in IMAGE_COLUMNS if column in columns]
    if len(image_columns) == 2:
        raise ValueError("the rows have the columns 'images' and 'image'. Put all images into 'images'.")
    return image_columns[0] if image_columns else None


def by_name(dataset: Any) -> dict[str, Any]:
    """Data sets of evaluation by name, that of a single one is `eval`; empty for None."""
    return dataset if isinstance(dataset, dict) else {} if dataset is None else {"eval": dataset}


def has_images(*datasets: object) -> bool:
    """Whether one of some data sets (or of dicts of them by name) has a column of images."""
    parts: list[object] = []
    for dataset in datasets:
        parts += by_name(dataset).values()
    stored = [part for part in parts if isinstance(part, (Dataset, IterableDataset))]
    return any(set(IMAGE_COLUMNS) & set(column_names(part)) for part in stored)


def split_dialogue(example: Row, marker: str = "\n\nAssistant:") -> dict[str, str]:
    """A pair of whole dialogues as `prompt`, `chosen` and `rejected`; for `Dataset.map`.

    The prompt ends behind the last `marker` up to which both are the same. Raises: ValueError where they share none.

    >>> chosen, rejected = "Human: Hi\\n\\nAssistant: Hello.", "Human: Hi\\n\\nAssistant: Go away."
    >>> split_dialogue({"chosen": chosen, "rejected": rejected})
    {'prompt': 'Human: Hi\\n\\nAssistant:', 'chosen': ' Hello.', 'rejected': ' Go away.'}
    """
    chosen, rejected = example["chosen"], example["rejected"]
    shared = chosen[: common_prefix_length(chosen, rejected)]
    start = shared.rfind(marker)
    if start < 0:
        texts = f"chosen {chosen[:40]!r} and rejected {rejected[:40]!r}"
        raise ValueError(f"{texts} share no {marker!r}. Give another marker, or filter the row.")
    end = start + len(marker)
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def prepare_multimodal_messages(messages: list[RowDict], images: list) -> list[RowDict]:
    """Copies of messages whose content is a list of parts, with the images in their places.

    Text becomes a text part. Where no message has an image part yet, all images go in front of the first user
    message's text; otherwise the parts are filled in order. Raises: ValueError where the images do not fit the places,
    TypeError for content of another kind.

    >>> prepare_multimodal_messages([{"role": "user", "content": "What is it?"}], images=["cat.png"])[0]["content"]
    [{'type': 'image', 'image': 'cat.png'}, {'type': 'text', 'text': 'What is it?'}]
    """
    structured = [{**message, "content": _parts(message)} for message in messages]
    places = [part for message in structured for part in message["content"] if part["type"] == "image"]
    if not places and images:
        first = next((message for message in structured if message["role"] == "user"), None)
        if first is None:
            raise ValueError(f"{len(images)} images but no user message for them. Add one, or image parts.")
        places = [{"type": "image"} for _ in images]
        first["content"] = [*places, *first["content"]]
    waiting = [part for part in places if "image" not in part]
    if len(waiting) != len(images):
        raise ValueError(f"{len(images)} images for {len(waiting)} image parts, expected as many.")
    for part, image in zip(waiting, images, strict=True):
        part["image"] = image
    return structured


def _parts(message: RowDict) -> list[RowDict]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise TypeError(f"content must be a string or a list of parts, got {type(content).__name__}.")
    return [dict(part) for part in content]


def prepare_multimodal_messages_vllm(messages: list[RowDict]) -> list[RowDict]:
    """Messages with image parts in the form that vLLM's `chat` takes: `image` becomes `image_pil`.

    >>> prepare_multimodal_messages_vllm([{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}])
    [{'role': 'user', 'content': [{'type': 'image_pil', 'image_pil': 'cat.png'}]}]
    """

    def renamed(part: RowDict) -> RowDict:
        if part.get("type") != "image":
            return dict(part)
        others = {key: value for key, value in part.items() if key not in ("type", "image")}
        return {"type": "image_pil", "image_pil": part["image"], **others}

    return [
        {**message, "content": [renamed(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def last_turn_as_completion(dataset: StoredOrStream) -> StoredOrStream:
    """Rows of `messages` or `conversations` as `prompt` and `completion`, the last turn; other rows as given."""
    names = [name for name in ("messages", "conversations") if name in column_names(dataset)]
    if not names:
        return dataset
    removed = [name for name in (names[0], "prompt") if name in column_names(dataset)]

    def split(rows: dict[str, list]) -> dict[str, list]:
        chats = rows[names[0]]
        return {"prompt": [chat[:-1] for chat in chats], "completion": [chat[-1:] for chat in chats]}

    return dataset.map(split, batched=True, remove_columns=removed)
