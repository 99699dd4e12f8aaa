"""A server of completions that scores with a tiny model, in vLLM's or OpenAI's form, with faults on request."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


class TinyTeacher:
    """`fault(body, answer)` returns another answer, a status, or None to close the connection."""

    def __init__(self, model: Any, *, echoes: bool = False, text_of: Callable[[int], str] | None = None) -> None:
        self.model, self.echoes, self.text_of = model, echoes, text_of or (lambda token: f"token_id:{token}")
        self.requests: list[dict[str, Any]] = []
        self.fault: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None
        self.url = ""

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | int:
        name = "logprobs" if self.echoes else "prompt_logprobs"
        if name not in body:
            return 400
        k = body[name]
        choices = [{"index": index, **self._scored(ids, k)} for index, ids in enumerate(body["prompt"])]
        return {"choices": choices[::-1]}

    def _scored(self, ids: list[int], k: int) -> dict[str, Any]:
        with torch.no_grad():
            logps = self.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        entries: list[Any] = [None]
        for own, row in zip(ids[1:], logps[:-1], strict=True):
            tokens = dict.fromkeys([own, *row.topk(k).indices.tolist()])  # the prompt's own token too, as vLLM does
            entries.append({token: float(row[token]) for token in tokens})
        if not self.echoes:
            form = [entry and {str(token): {"logprob": logp} for token, logp in entry.items()} for entry in entries]
            return {"text": "", "prompt_logprobs": form}
        form = [entry and {self.text_of(token): logp for token, logp in entry.items()} for entry in entries]
        return {
            "text": "",
            "logprobs": {"tokens": [self.text_of(token) for token in ids], "top_logprobs": form},
        }


@contextmanager
def serving(teacher: TinyTeacher) -> Iterator[TinyTeacher]:
    """Serve on a free port of this machine; `teacher.url` is the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "tiny"}]} if self.path == "/v1/models" else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            teacher.requests.append({**body, "authorization": self.headers.get("Authorization")})
            answer = teacher.answer(body)
            if teacher.fault is not None and isinstance(answer, dict):
                answer = teacher.fault(body, answer)
            if answer is not None:
                self._send(answer)

        def _send(self, answer: Any) -> None:
            status = answer if isinstance(answer, int) else 200
            text = (
                answer
                if isinstance(answer, bytes)
                else json.dumps({"error": "refused"} if status != 200 else answer).encode()
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    teacher.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield teacher
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def slow(seconds: float) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    def fault(body: dict[str, Any], answer: dict[str, Any]) -> Any:
        time.sleep(seconds)
        return answer

    return fault
