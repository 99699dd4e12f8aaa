"""The server of `trl vllm-serve`: a model in vLLM behind HTTP, with a weight channel. Needs vLLM and FastAPI."""

import logging
from contextlib import ExitStack, closing

from trl.generation.serving.app import GenerationServer
from trl.generation.serving.connection import CannotServe, needing_address, server_token, until_told
from trl.generation.vllm.backend import BackendDied, ServedModel, VLLMBackend

logger = logging.getLogger(__name__)


def run_server(model: ServedModel, host: str, port: int) -> None:
    """Load the model and answer requests until SIGTERM or Ctrl-C.

    Raises: CannotServe if the address is taken, the token cannot be written, vLLM cannot run the model (with
    TRL_TRACEBACK=1 `trl vllm-serve` shows vLLM's own error) or ends.
    """
    with until_told(), ExitStack() as stack:
        with needing_address(host, port):
            server = stack.enter_context(closing(GenerationServer(host, port)))
        try:
            backend = stack.enter_context(closing(VLLMBackend(model)))
        except Exception as error:
            raise CannotServe(f"vLLM could not load {model.model}: {error} See its log above.") from error
        # Another one may have begun to listen meanwhile.
        with needing_address(host, port):
            server.listen()
        # The port is this server's: the file is named after it, and would replace that of another.
        token = stack.enter_context(server_token(host, port))
        logger.info("Serving %s on http://%s:%d", model.model, host, port)
        try:
            server.serve(backend, token=token)
        except BackendDied as error:
            raise CannotServe(str(error)) from error
