"""How to use a saved model: printed after training, and on the page of a run."""

from pathlib import Path

_TASKS = {
    "ForCausalLM": "text-generation", "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "image-text-to-text", "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}  # fmt: skip


def usage_of(folder: str | Path, architecture: str, *, chats: bool, base: str = "") -> list[str]:
    """How to use a saved model of an architecture that has a pipeline. `base` is a comment on its adapter."""
    task = next((task for end, task in _TASKS.items() if architecture.endswith(end)), None)
    if task is None:
        return []
    writes = task == "text-generation"
    if writes and chats:
        return [f"trl chat {folder}{base}"]
    lines = ["from transformers import pipeline", f'model = pipeline("{task}", "{folder}"){base}']
    return [*lines, 'print(model("Some text")[0]["generated_text"])'] if writes else lines
