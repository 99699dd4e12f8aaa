"""Messages with images: placeholders in structured content, filled with the images themselves."""

from typing import Any


def prepare_multimodal_messages(messages: list[dict[str, Any]], images: list) -> list[dict[str, Any]]:
    """Messages whose content is a list of parts, with the images in their places; the given messages stay as they are.

    Text becomes a text part. Where no message has an image part yet, all images go in front of the first user
    message's text; otherwise the parts are filled in order.

    Raises: ValueError where the images do not fit the places, TypeError for content of another kind.

    >>> prepare_multimodal_messages([{"role": "user", "content": "What is it?"}], images=["cat.png"])[0]["content"]
    [{'type': 'image', 'image': 'cat.png'}, {'type': 'text', 'text': 'What is it?'}]
    """
    structured = [{**message, "content": _parts(message)} for message in messages]
    places = [part for message in structured for part in message["content"] if part["type"] == "image"]
    if not places and images:
        first = next((message for message in structured if message["role"] == "user"), None)
        if first is None:
            raise ValueError(
                f"{len(images)} images but no user message to put them in. Add a user message, or image parts."
            )
        places = [{"type": "image"} for _ in images]
        first["content"] = [*places, *first["content"]]
    waiting = [part for part in places if "image" not in part]
    if len(waiting) != len(images):
        raise ValueError(
            f"{len(images)} images for {len(waiting)} image places in the messages, expected as many. Give one image for "
            'each {"type": "image"} part.'
        )
    for part, image in zip(waiting, images, strict=True):
        part["image"] = image
    return structured


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise TypeError(
            f"content is of type {type(content).__name__}, expected a string or a list of parts. Convert it with str()."
        )
    return [dict(part) for part in content]


def prepare_multimodal_messages_vllm(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with image parts in the form that vLLM's `chat` takes: `image` becomes `image_pil`.

    >>> prepare_multimodal_messages_vllm([{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}])
    [{'role': 'user', 'content': [{'type': 'image_pil', 'image_pil': 'cat.png'}]}]
    """
    return [
        {**message, "content": [_vllm_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def _vllm_part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image":
        return dict(part)
    others = {key: value for key, value in part.items() if key not in ("type", "image")}
    return {"type": "image_pil", "image_pil": part["image"], **others}
