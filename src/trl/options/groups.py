"""What an option group is, and how a config changes the default of a field that stands elsewhere."""

import dataclasses
from typing import Any

from trl.options.values import check_numbers, read_text_values


class OptionGroup:
    """Base of all option groups: dataclass mixins that hold related fields and check them.

    A group checks its own fields in `check`, which calls `super().check()`; the config that combines the groups calls
    `settle` once, before anything else reads the values.
    """

    def check(self) -> None:
        """Raise on bad values and bring good ones into their final form."""

    def settle(self) -> None:
        """Read numbers and booleans given as text, run every `check`, then hold numbers to the table of bounds.

        Raises: ValueError or TypeError for bad values.
        """
        read_text_values(self)
        self.check()
        check_numbers(self)


def changed_default(owner: type, name: str, default: Any) -> Any:
    """A dataclass field `name` with the help text that it has in `owner` and another default.

    Lists and dicts are copied for every instance.
    """
    metadata = next(field.metadata for field in dataclasses.fields(owner) if field.name == name)
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
