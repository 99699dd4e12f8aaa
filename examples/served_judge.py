"""A pairwise judge that is a model behind `trl vllm-serve`.

    CUDA_VISIBLE_DEVICES=0 trl vllm-serve --model Qwen/Qwen3-8B --port 8001
    JUDGE_SERVER=http://localhost:8001 CUDA_VISIBLE_DEVICES=1 trl online-dpo --judge examples.served_judge.ServedJudge \
        --model_name_or_path MODEL --dataset_name DATASET --output_dir runs/served --judge_cache answers.sqlite

All pairs of a call are sent in one request; the server decodes the character 0 or 1.
"""

import os

from transformers import AutoTokenizer

from trl.experimental.judges import BasePairwiseJudge
from trl.extras.vllm_client import VLLMClient
from trl.rewards.judges import QUESTION, shown_pairs


class ServedJudge(BasePairwiseJudge):
    """Shows a question with both completions to the model of a server, which answers 0 or 1.

    `base_url` is the address of the server, by default that of the environment variable JUDGE_SERVER. The server may take
    `connection_timeout` seconds to load its model.
    """

    def __init__(self, base_url: str | None = None, connection_timeout: float = 240.0) -> None:
        address = base_url or os.environ.get("JUDGE_SERVER", "http://localhost:8001")
        self.client = VLLMClient(address, connection_timeout=connection_timeout)
        self.model = self.client.model()["model"]
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.cache_key = f"ServedJudge {self.model}"

    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
        """The index of the better completion of each pair."""
        pairs = shown_pairs(prompts, completions, shuffle=shuffle_order)
        questions = [QUESTION.format(prompt=pair.prompt, response0=pair.first, response1=pair.second) for pair in pairs]
        found = self.client.chat(
            [[{"role": "user", "content": question}] for question in questions],
            temperature=0.0,
            max_tokens=1,
            guided_decoding_regex="[01]",
        )
        shown = self.tokenizer.batch_decode(found["completion_ids"], skip_special_tokens=True)
        return [
            pair.original(int(answer)) if answer in ("0", "1") else -1
            for pair, answer in zip(pairs, shown, strict=True)
        ]
