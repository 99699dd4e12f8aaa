import pytest

from trl.scripts.arguments import ColumnMapping


def test_column_mapping():
    assert ColumnMapping().renames() == {}
    assert ColumnMapping(["question=prompt", "a=b"]).renames() == {"question": "prompt", "a": "b"}


@pytest.mark.parametrize("items", [["question"], ["=prompt"], ["question="], ["a=b", "a=c"], ["a=c", "b=c"]])
def test_bad_column_mappings(items):
    with pytest.raises(ValueError, match="column_mapping"):
        ColumnMapping(items)
