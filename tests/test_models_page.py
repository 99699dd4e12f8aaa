"""docs/reference/models.md has a row for each model type, and says what the library finds when it loads one."""

import pytest
import transformers

from tests.architectures import MODEL_TYPES
from tests.models.packed.test_support import MIXERS, PADDED
from tests.models_page import PAGE, row_of, written_rows

VERSION = "5.19.0"


def test_batches_are_those_that_the_test_of_every_type_finds():
    rows = written_rows()
    assert list(rows) == list(MODEL_TYPES)
    assert {name for name, row in rows.items() if "| padded | – |" in row} == set(PADDED)
    assert {name for name, row in rows.items() if "cut into sequences" in row} == MIXERS
    words = " ".join(PAGE.read_text(encoding="utf-8").split())
    decoded = sum("| our cache" in row for row in rows.values())
    assert f"Of {len(rows)} types {len(rows) - len(PADDED)} are packed, and {decoded} decode with our cache." in words
    assert f"transformers {VERSION}" in words


@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the page is of transformers {VERSION}")
@pytest.mark.parametrize("model_type", ["llama", "bloom", "gpt_oss", "lfm2", "llama4_text", "phimoe", "qwen3_next"])
def test_a_row_is_what_the_script_gives(model_type):
    assert written_rows()[model_type] == row_of(model_type), "run python -m tests.models_page"
