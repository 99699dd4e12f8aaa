"""Tokens, keys and passwords are left out of all that is written: checkpoints, cards, trackers, errors."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

Config = TypeVar("Config")

REDACTED = "<REDACTED>"
_KEY = (  # of a secret; pad_token and the like are part of the vocabulary
    r"(?:(?:api|access|private)[_-]?key|secret(?:[_-]?key)?|passw(?:or)?d|authorization|credentials?"
    r"|(?:(?:hub|hf|auth|access|refresh|session|bearer|api|server)[_-]|(?<![a-z])(?<![a-z0-9][_-]))token)"
)
_IS_KEY = re.compile(rf"{_KEY}$", re.IGNORECASE)
_IN_TEXT = (
    (re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|(?:sk-|gh[ps]_|github_pat_|wandb_v1_)[\w-]{20,})"), REDACTED),
    (re.compile(r"(?<=://)[^\s\"',]+(?=@)"), REDACTED),  # user and password of an address
    (re.compile(r"(\bbearer\s+)[^\s\"',}]+", re.IGNORECASE), rf"\1{REDACTED}"),
    (
        re.compile(rf"((?:{_KEY}[\"']?\s*[:=]|--[\w-]*{_KEY}\s)\s*[\"']?)(?!bearer)[^\s\"',;&)\]}}]+", re.IGNORECASE),
        rf"\1{REDACTED}",
    ),
)
_WANDB = re.compile(r"[0-9a-f]{40}")  # also a commit's name, which is public
_COMMITS = ("revision", "commit", "sha", "hash")


def redacted(value: Any, key: str = "") -> Any:
    """A copy of JSON-like values in which secrets are replaced: text under the key of a secret, or that looks like one.

    >>> redacted({"token": "mine", "pad_token": "<pad>", "headers": ["Bearer mine"]})
    {'token': '<REDACTED>', 'pad_token': '<pad>', 'headers': ['Bearer <REDACTED>']}
    >>> redacted("http://user:password@127.0.0.1:9/v1?api_key=mine")
    'http://<REDACTED>@127.0.0.1:9/v1?api_key=<REDACTED>'
    """
    if isinstance(value, Mapping):
        return {name: redacted(item, str(name)) for name, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(redacted(item, key) for item in value)
    if type(value) is not str or not value:
        return value
    if _IS_KEY.search(key) or (_WANDB.fullmatch(value) and not key.endswith(_COMMITS)):
        return REDACTED
    for pattern, instead in _IN_TEXT:
        value = pattern.sub(instead, value)
    return value


class Unwritten(str):
    """A secret that this process uses; pickled, it is replaced."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return str, (REDACTED,)


def without_partial(function: object) -> object:
    """The function inside `functools.partial`s."""
    while isinstance(function, partial):
        function = function.func
    return function


def unwritten(config: Config) -> Config:
    """A copy of a config that can be saved: without secrets (the Hub's token only where pickled), functions by name."""
    snapshot: Any = copy.copy(config)
    for field in dataclasses.fields(snapshot):
        value = getattr(snapshot, field.name)
        if callable(value) and not isinstance(value, type):
            function = without_partial(value)
            value = getattr(function, "__qualname__", type(function).__qualname__)
        is_used = field.name == "hub_token" and value
        setattr(snapshot, field.name, Unwritten(value) if is_used else redacted(value, field.name))
    return snapshot
