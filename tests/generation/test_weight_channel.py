"""The weight channel between real processes: same bits, and errors instead of waiting for ever."""

import ast
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.generation.channel_runs import ran
from tests.ports import free_port
from tests.two_processes import ending, prepared
from trl.generation.serving.weight_channel import WeightChannel


@pytest.mark.distributed
def test_a_sender_and_two_receivers():
    ports = [free_port(), free_port()]
    prepared()
    with ThreadPoolExecutor() as ranks:  # ranks 0 and 1 here, rank 2 there, where it dies with its process
        other = ranks.submit(ending, "tests.generation.channel_runs", "2", *map(str, ports))
        sender, receiver = ranks.map(lambda rank: ran(rank, ports), range(2))
        status, written = other.result()
    assert status == 0, written
    died = ast.literal_eval(written)
    assert not torch.distributed.is_initialized()
    for same_first, same_second, silent, closed in (receiver[:4], died):
        assert same_first and same_second
        assert "took longer than 0.5 s" in silent and float(silent.split()[0]) < 30
        assert "The weight channel is closed" in closed
    assert "The weight channel broke" in sender[0] and "The weight channel broke" in receiver[4]


@pytest.mark.distributed
def test_a_sender_that_never_comes_is_an_error_in_time():
    port = free_port()
    said = rf"127.0.0.1:{port} needs 2 processes within 1 s; rank 1: .*wait timeout"
    for _ in range(2):  # the port is free again afterwards
        started = time.monotonic()
        with pytest.raises(ConnectionError, match=said):
            WeightChannel.join("127.0.0.1", port, 1, 2, backend="gloo", timeout_s=1, serves_store=True)
        assert time.monotonic() - started < 30


def test_a_port_that_is_taken_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=rf"127.0.0.1:{port} .*in use"):
            WeightChannel.join("127.0.0.1", port, 1, 2, backend="gloo", timeout_s=60, serves_store=True)
