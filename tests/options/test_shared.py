"""Flat dicts of settings."""

import pytest

from trl.options.shared import flatten_dict


def test_a_key_with_the_separator_is_an_error():
    assert flatten_dict({"a": {"b": {"c": 1}}, "d": 2}, sep=".") == {"a.b.c": 1, "d": 2}
    with pytest.raises(ValueError, match="'a/b'"):
        flatten_dict({"a/b": 1})
