"""A teacher behind vLLM's own server (`vllm serve`), where vLLM is installed (`make test-vllm`)."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from tests.generation.real_server import SMALL, saved
from tests.generation.vllm_runs import model
from tests.ports import free_port
from tests.trainer.resume_worker import tokenizer
from trl.generation.teacher_servers import TeacherServer

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is an extra: `make test-vllm` installs it apart"),
    pytest.mark.slow,
]
ROWS = [[5, 6, 7, 8], [9, 10], [11, 5, 12, 13, 14, 15]]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    checkpoint, log = saved(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("log") / "log"
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        command,
        env=os.environ | SMALL,
        start_new_session=True,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        until = time.monotonic() + 600
        while "Application startup complete" not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(900)
def test_its_columns_are_the_models_own(url):
    policy = model(0)
    server = TeacherServer(url, top_k=4, tokenizer=tokenizer(), vocabulary=64, deadline=60.0)
    found = server.best(ROWS, [f"row {number}" for number in range(len(ROWS))])
    for ids, (tokens, logps) in zip(ROWS, found, strict=True):
        with torch.no_grad():
            want = policy(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1).topk(4)
        assert tokens.tolist() == want.indices.tolist()
        torch.testing.assert_close(torch.tensor(logps).float(), want.values, rtol=1e-4, atol=1e-4)


def test_more_tokens_than_it_gives_are_refused(url):
    with pytest.raises(ValueError, match="logprobs"):
        TeacherServer(url, top_k=60, tokenizer=tokenizer(), vocabulary=64, deadline=60.0)
