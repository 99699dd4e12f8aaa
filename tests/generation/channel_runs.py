"""One rank of `test_weight_channel.py`, in a process of its own: `-m tests.generation.channel_runs RANK PORT PORT`."""

import math
import sys
import time

import torch

from trl.generation.serving.weight_channel import WeightChannel

ENTRIES = [
    (torch.float32, (3, 5)), (torch.bfloat16, (7,)), (torch.int64, ()), (torch.bool, (5,)), (torch.float8_e4m3fn, (9,)),
    (torch.float16, (0, 4)), (torch.float32, (5000, 4000)), (torch.float16, (1000, 1000)),
]  # fmt: skip


def tensors(seed):
    """Random bits of every dtype, NaNs among them."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for dtype, shape in ENTRIES:
        if dtype is torch.bool:
            made.append(torch.rand(shape, generator=random) > 0.5)
        else:
            bits = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=random)
            made.append(bits.view(dtype).view(shape))
    return made


def ran(rank, ports):
    """What one of three ranks saw: whole updates; a sender that sends nothing; a receiver that dies."""
    channel = joined(rank, ports[0])
    said = []
    for seed in range(2):
        if rank == 0:
            channel.send(tensors(seed))
        else:
            said.append(all(map(same, channel.receive(ENTRIES), tensors(seed))))
    if rank == 0:
        time.sleep(1.5)
    else:
        channel.timeout_s = 0.5
        said += [error(channel, rank), error(channel, rank)]
    channel.close()
    channel.close()
    channel = joined(rank, ports[1])
    if rank < 2:
        said.append(error(channel, rank))
    return said


def joined(rank, port):
    return WeightChannel.join("127.0.0.1", port, rank, 3, backend="gloo", timeout_s=60, serves_store=rank == 1)


def same(found, sent):
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, sent)]
    return found.dtype == sent.dtype and found.shape == sent.shape and torch.equal(*bits)


def error(channel, rank):
    """Seconds until the error, and its text."""
    started = time.monotonic()
    try:
        channel.send(tensors(0)) if rank == 0 else list(channel.receive(ENTRIES))
        return "no error"
    except ConnectionError as error:
        return f"{time.monotonic() - started:.1f} {error}"


if __name__ == "__main__":
    print(ran(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]), flush=True)
