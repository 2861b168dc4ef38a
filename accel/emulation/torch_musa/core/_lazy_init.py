"""``torch_musa.core._lazy_init``."""

from torch_musa.device import _lazy_call, _lazy_init  # noqa: F401
