"""What a process keeps for the backward pass and sends, of a row that several share: `-m tests.trainer.sequence_costs OUT.pt`."""

import sys
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import PartialState

from tests.tiny import tiny_model
from trl.models.packed.sequence_group import SequenceGroup
from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions

LENGTHS, WIDTH, LAYERS = (300, 211, 512), 64, 2  # an odd number of tokens


def costs(group: SequenceGroup | None) -> tuple[int, list[int]]:
    """Bytes of the tensors saved in a forward pass, without weights; numbers sent in each exchange of forward and backward."""
    heads = {"hidden_size": WIDTH, "head_dim": 16, "num_key_value_heads": 4, "intermediate_size": 192}
    model = tiny_model("llama", max_position_embeddings=1024, num_hidden_layers=LAYERS, **heads)
    scorer = Scorer(model)
    scorer.join(group)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    ids = torch.arange(sum(LENGTHS))[None] % 90 + 3
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    saved, sent, exchange = dict[int, int](), list[int](), dist.all_to_all_single

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def counted(received: torch.Tensor, parts: torch.Tensor, **options: object) -> None:
        sent.append(parts.numel())
        exchange(received, parts, **options)

    batch = {"input_ids": ids, "position_ids": positions, "labels": ids}
    with patch.object(dist, "all_to_all_single", counted):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scored = scorer.score(model.train(), batch, ScoreOptions(loss_of=lambda logps, _: -logps))
        assert scored.total is not None
        scored.total.backward()
    return sum(saved.values()), sent


def main(out: str) -> None:
    torch.set_num_threads(1)
    PartialState(cpu=True)
    alone, together = costs(None), costs(SequenceGroup.of_run(dist.get_world_size()))
    if dist.get_rank() == 0:
        torch.save((alone, together), out)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
