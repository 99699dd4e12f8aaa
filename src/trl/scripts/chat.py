"""`trl chat MODEL`: a conversation with a model, in a terminal or through a pipe (one message per line)."""

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from trl.options.groups import moved, option
from trl.options.model import ModelSource, QuantizationOptions
from trl.scripts.parser import TrlParser
from trl.scripts.running import reporting_input_errors, run_script

if TYPE_CHECKING:
    from rich.console import Console

    from trl.generation.engine import Sampling

SETTINGS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
COMMANDS = """\
  clear   begin a new conversation
  help    show these commands
  exit    end, as Ctrl-D does; Ctrl-C ends an answer
"""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # a model must not command the terminal


@dataclass
class LoadedModel(QuantizationOptions, ModelSource):
    """The model of a `command` that needs one."""

    command: ClassVar[str]

    def check(self) -> None:
        super().check()
        if not self.model_name_or_path:
            place = "its folder or its name on the Hub"
            raise ValueError(f"The model is missing. Give {place}: trl {self.command} MODEL.")


@dataclass
class ChatArguments(LoadedModel):
    """The model of `trl chat`, how its answers are drawn, and names in the terminal."""

    command = "chat"
    torch_dtype: str | None = moved(to="dtype")
    device: str | None = option(None, "Device to run on. None: the accelerator, else the CPU.")
    user: str = option("user", "Name to show before your messages.")
    system_prompt: str | None = option(None, "First message, with the role system.")
    save_folder: str = moved("conversations are not saved.", default="./chat_history/")
    examples_path: str | None = moved("there are no examples.", aliases=["--examples"])
    max_new_tokens: int = option(256, "Longest answer, in tokens.")
    do_sample: bool = option(True, "Draw tokens; else take the most likely ones.")
    num_beams: int = option(1, "There is no beam search.", "[1, 1]")
    temperature: float = option(1.0, "Divides the logits; 0 takes the most likely tokens.")
    top_k: int = option(50, "Draw from this many most likely tokens; 0 for all.")
    top_p: float = option(1.0, "Draw from the fewest tokens that have this probability.")
    repetition_penalty: float = option(1.0, "Above 1, tokens seen before are less likely.")
    eos_tokens: str | None = option(None, "Tokens that end an answer, with commas. None: the model's.")
    eos_token_ids: str | None = option(None, "The same as ids, with commas.")

    def check(self) -> None:
        super().check()
        self.sampling(())

    def sampling(self, ends: Sequence[int]) -> "Sampling":
        """How answers are drawn that end at the tokens `ends`."""
        from trl.generation.engine import Sampling

        return Sampling(**{name: getattr(self, name) for name in SETTINGS}, stop_token_ids=tuple(ends))


def loaded_engine(arguments: Any) -> Any:
    """The engine of a model on its device. Raises: ValueError, OSError if it cannot be loaded or has no template."""
    import torch
    from transformers.utils import logging

    from trl.data.rendering import text_tokenizer
    from trl.generation.transformers.engine import TransformersEngine
    from trl.models.loading import create_model_from_path, load_processing_class
    from trl.scripts.loading import model_init_kwargs

    logging.disable_progress_bar()
    path = str(arguments.model_name_or_path)
    loading = model_init_kwargs(arguments)
    model: Any = create_model_from_path(path, **loading).eval()
    if "quantization_config" not in loading:
        model.to(arguments.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    tokenizer = text_tokenizer(load_processing_class(path, trust_remote_code=arguments.trust_remote_code))
    if not tokenizer.chat_template:
        raise ValueError(f"The tokenizer of '{path}' has no chat template. Use a model for chats.")
    return TransformersEngine(model, tokenizer=tokenizer)


class Chat:
    """A model, the conversation with it so far, and the settings."""

    def __init__(self, arguments: ChatArguments, console: "Console") -> None:
        from trl.generation.transformers.requests import stop_tokens

        self.arguments, self.console = arguments, console
        self.engine = loaded_engine(arguments)
        self.tokenizer = self.engine.tokenizer
        tokens = arguments.eos_tokens.split(",") if arguments.eos_tokens else []
        if unknown := [token for token in tokens if token not in self.tokenizer.get_vocab()]:
            raise ValueError(f"eos_tokens must be tokens of the tokenizer, got {unknown[0]!r}.")
        ends = [int(number) for number in (arguments.eos_token_ids or "").split(",") if number]
        ends += self.tokenizer.convert_tokens_to_ids(tokens)
        self.ends = ends or stop_tokens(self.engine.model, self.tokenizer)
        self.clear()

    def clear(self) -> None:
        prompt = self.arguments.system_prompt
        self.messages = [{"role": "system", "content": prompt}] if prompt else []

    def answer(self, message: str) -> None:
        """Stream the answer to a message, up to Ctrl-C. Raises: ValueError, TemplateError for unusable messages."""
        ids: list[int] = []
        shown = ""

        def show(newest: Sequence[int], *, last: bool = False) -> None:
            nonlocal shown
            ids.extend(newest)
            text = _CONTROL.sub("", self.tokenizer.decode(ids, skip_special_tokens=True))
            if last or not text.endswith("\ufffd"):  # half a character
                self.console.print(text[len(shown) :], end="", markup=False, soft_wrap=True)
                shown = text

        messages = [*self.messages, {"role": "user", "content": message}]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        try:
            sampling = self.arguments.sampling(self.ends)
            self.engine.generate([prompt], sampling, listener=lambda _, newest: show(newest.tolist()))
        except KeyboardInterrupt:
            self.console.print(" (stopped)", style="dim", end="")
        show([], last=True)
        self.console.print()
        self.messages = [*messages, {"role": "assistant", "content": shown}]


def chat(arguments: ChatArguments) -> None:
    """Answer messages until the input ends. Without a terminal only the answers are printed."""
    from jinja2 import TemplateError

    from trl.reporting.tables import open_console

    console, terminal = open_console(highlight=False), sys.stdin.isatty()
    with reporting_input_errors():
        talk = Chat(arguments, console)
    if terminal:
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401 - edits the line and keeps a history
        console.print(f"{arguments.model_name_or_path}: type a message, or help.", markup=False)
    while True:
        try:
            line = input(f"{arguments.user}: " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(end="\n" if terminal else "")
            line = "exit"
        if line == "exit":
            break
        try:
            if line == "help":
                print(COMMANDS, end="")
            elif line == "clear":
                talk.clear()
            elif line:
                if terminal:
                    console.print("assistant: ", style="bold green", end="")
                talk.answer(line)
        except (ValueError, FloatingPointError, TemplateError) as error:
            console.print(f"error: {error}", style="red", markup=False)


def make_parser() -> TrlParser:
    return TrlParser(
        ChatArguments,  # pyright: ignore[reportArgumentType]
        prog="trl chat",
        usage="trl chat MODEL [options]",
        description="Talk to a model: a folder, one with an adapter, or a name on the Hub.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run_script(make_parser(), chat, model_first(argv))


def model_first(argv: Sequence[str] | None) -> list[str]:
    """Arguments of a command whose first one may be the model."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--model_name_or_path")
    return words
