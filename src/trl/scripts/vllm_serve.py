"""`trl vllm-serve`: a model served by vLLM, for trainers that generate with it and send it their weights."""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any, Literal, NoReturn

from trl._lazy import attach
from trl.generation.vllm.backend import BackendDied, ServedModel, VLLMBackend, check_vllm
from trl.options.groups import option
from trl.scripts.parser import TrlParser
from trl.scripts.running import CommandError, reporting_input_errors, run_script

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

logger = logging.getLogger(__name__)


@dataclass
class ServeArguments(ServedModel):
    """The model, how vLLM runs it, and where the server listens."""

    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 lets others in, with a secret in TRL_VLLM_SERVER_TOKEN."
    )
    port: int = option(8000, "Port to listen on.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] = option("info", "Level of logs.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be from 1 to 65535, got {self.port}.")


def make_parser() -> TrlParser:
    """The parser of `trl vllm-serve`."""
    kinds: Any = ServeArguments
    return TrlParser(
        kinds,
        prog="trl vllm-serve",
        usage="trl vllm-serve --model MODEL [--config FILE] [options]",
        description="Serve a model with vLLM: trainers with use_vllm=True generate with it and send it their weights.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process is told to end (Ctrl-C, SIGTERM); returns the exit status."""
    return run_script(make_parser(), serve, argv)


def serve(arguments: ServeArguments) -> None:
    """Load the model and answer requests until SIGTERM or Ctrl-C.

    Raises: CommandError if vLLM or the token is missing, or the address is taken.
    """
    from trl.generation.serving.connection import check_token_source, server_token

    os.environ["VLLM_LOGGING_LEVEL"] = arguments.log_level.upper()
    logging.getLogger("trl").setLevel(arguments.log_level.upper())
    with ExitStack() as stack:
        stack.enter_context(until_told())
        with reporting_input_errors():
            check_vllm("trl vllm-serve")
            check_token_source(arguments.host)
            from trl.generation.serving.app import GenerationServer

        with needing_address(arguments.host, arguments.port):
            server = stack.enter_context(GenerationServer(arguments.host, arguments.port))
        backend = stack.enter_context(loaded(arguments))
        # Another one may have begun to listen meanwhile.
        with needing_address(arguments.host, arguments.port):
            server.listen()
        # The port is this server's: the file is named after it, and would replace that of another.
        with reporting_input_errors():
            token = stack.enter_context(server_token(arguments.host, arguments.port))
        logger.info("Serving %s on http://%s:%d", arguments.model, arguments.host, arguments.port)
        try:
            server.serve(backend, token=token)
        except BackendDied as error:
            raise CommandError(str(error)) from error


class Told(BaseException):
    """The process was told to end. No `Exception`, so that vLLM passes it on."""


@contextmanager
def until_told() -> Iterator[None]:
    """Leave the block when the process is told to end (SIGTERM, Ctrl-C); told again while it ends, it goes on
    ending.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Told(signal.Signals(number).name)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    except Told as told:
        logger.info("Ended by %s.", told)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def loaded(arguments: ServeArguments) -> Iterator[VLLMBackend]:
    """The model in vLLM, whose processes end with the block.

    Raises: CommandError for a model that vLLM cannot run; with TRL_TRACEBACK=1 it shows vLLM's own error.
    """
    served = {each.name: getattr(arguments, each.name) for each in fields(ServedModel)}
    try:
        backend = VLLMBackend(ServedModel(**served))
    except Exception as error:
        raise CommandError(f"vLLM could not load {arguments.model}: {error} See its log above.") from error
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def needing_address(host: str, port: int) -> Iterator[None]:
    """Raises: CommandError if nothing can listen on the address in the block."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CommandError(
            f"Nothing can listen on {host}:{port}: {reason}. Choose another --port, or end its server."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
