"""The table of docs/reference/models.md: `python -m tests.models_page` writes it, `tests/test_models_page.py` compares it.

Each row is the answer of the tests that the library makes of a small copy of a model when it is loaded.
"""

import re
from pathlib import Path

from tests.architectures import MODEL_TYPES, model_of
from trl.generation.transformers.decode_check import decode_unsupported
from trl.generation.transformers.decoders import fused_unsupported
from trl.models.packed.support import packed_unsupported, packing_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"
HEADER = "| model type | batches | shared prompts | decoding | reasons |\n|---|---|---|---|---|"
YES, NO = "yes", "–"


def row_of(model_type: str) -> str:
    """The row of a model type: layout of batches, whether prompts are shared, who decodes, and what prevents the rest."""
    model = model_of(model_type)
    packing, unpacked, undecoded = packing_of(model), packed_unsupported(model), decode_unsupported(model)
    mixers = ", ".join(f"`{name}`" for name in sorted(kind.__name__ for kind in packing.mixers))
    reasons = []
    if mixers and unpacked is None:
        reasons.append(f"cut into sequences: {mixers}")
    if unpacked is not None:
        reasons.append(f"padded: {_short(unpacked)}")
    if undecoded is not None and undecoded != unpacked:
        reasons.append(f"`generate`: {_short(undecoded)}")
    decoding = "`generate`" if undecoded else "our cache" if fused_unsupported(model) else "our cache and step"
    shares = YES if unpacked is None and packing.shares else NO
    layout = "packed" if unpacked is None else "padded"
    return f"| `{model_type}` | {layout} | {shares} | {decoding} | {'; '.join(reasons)} |"


def _short(reason: str) -> str:
    """Without PyTorch's message, and the words that all have."""
    return re.sub(r" \(\w+Error: .*", "", reason).replace(" of a small copy gives", " gives")


def written_rows() -> dict[str, str]:
    """The rows that the page has, by model type."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {row.split("`")[1]: row for row in rows}


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, table = text.split(HEADER)
    after = table.split("\n\n", 1)[1]
    rows = "\n".join(row_of(model_type) for model_type in MODEL_TYPES)
    PAGE.write_text(f"{before}{HEADER}\n{rows}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
