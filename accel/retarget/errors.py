"""What goes wrong while a CUDA-hard-coded library is pointed at another device."""

from __future__ import annotations

from accel.errors import AcceleratorError


class RetargetError(AcceleratorError):
    """The import hook cannot be installed, or cannot rewrite a module."""


class UnknownSite(RetargetError):
    """Source code reaches CUDA in a form that is not known how to rewrite. The message names file, line and form."""


class MissingDeviceAttribute(RetargetError, AttributeError):
    """Rewritten code used an attribute of ``torch.cuda`` that the device does not offer.

    An AttributeError too, so that ``hasattr(torch.cuda, …)`` in the library keeps its meaning.
    """


class MissingDeviceImport(RetargetError, ImportError):
    """``from torch.cuda import X`` where the device offers no X; an ImportError too, for guarded imports."""
