"""``torch_musa.core._utils``."""

from torch_musa.device import _get_device_index as _get_musa_device_index  # noqa: F401
