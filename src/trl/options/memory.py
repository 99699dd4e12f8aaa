"""Option groups that trade time for memory."""

from dataclasses import dataclass, field

from trl.options.groups import OptionGroup


@dataclass
class Offloading(OptionGroup):
    """Activations kept outside the accelerator."""

    activation_offloading: bool = field(
        default=False,
        metadata={
            "help": "Keep the activations that the backward pass needs in CPU memory until then: less accelerator "
            "memory for some copying. On a CPU it changes nothing."
        },
    )
