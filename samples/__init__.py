"""What a sample is and where prompts come from. Importing this package loads nothing heavy: the data source comes with
NumPy and the configuration, and is loaded when it is first asked for."""

from typing import TYPE_CHECKING, Any

from samples.errors import InputError
from samples.loading import load_function
from samples.sample import Group, Message, Reward, Sample, Status

if TYPE_CHECKING:
    from samples.source import DataSource

__all__ = ["DataSource", "Group", "InputError", "Message", "Reward", "Sample", "Status", "load_function"]


def __getattr__(name: str) -> Any:
    if name == "DataSource":
        from samples.source import DataSource

        return DataSource
    raise AttributeError(f"module 'samples' has no attribute {name!r}")
