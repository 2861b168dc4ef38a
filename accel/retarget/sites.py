"""Which forms of reaching CUDA are rewritten, and which of them each tested Megatron-Core contains."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from accel.retarget.errors import RetargetError


class Site(Enum):
    """One way in which source code names CUDA; the value is how it looks."""

    NAMESPACE = "torch.cuda.X"
    LITERAL = "'cuda'"
    INDEXED_LITERAL = "'cuda:0'"
    INDEXED_FSTRING = "f'cuda:{index}'"
    TENSOR_TYPE = "'torch.cuda.FloatTensor'"
    DEVICE_CALL = "torch.device('cuda', index)"
    MOVE = "x.cuda()"
    HAS_MOVE = "hasattr(x, 'cuda')"
    FROM_CUDA = "from torch.cuda import X"
    FROM_TORCH = "from torch import cuda"
    IMPORT = "import torch.cuda"
    IMPORT_AS = "import torch.cuda as X"
    GETATTR = "getattr(torch, 'cuda')"
    DEVICE_MODULE = "torch.get_device_module('cuda')"
    BINDING = "torch._C._cuda_X"


# Attributes called `cuda` that describe the build of torch, not a device, and stay as they are.
LEFT_ALONE = frozenset({"torch.backends.cuda", "torch.version.cuda"})


@dataclass(frozen=True)
class SiteRules:
    """What may be rewritten in a library: kinds of site, and texts that name CUDA but only label something."""

    kinds: frozenset[Site]
    labels: frozenset[str] = frozenset()


# A user's modules: every form that can be rewritten.
USER_RULES = SiteRules(frozenset(Site))


@dataclass(frozen=True)
class TestedVersions:
    """What was found in Megatron-Core ``first`` <= version < ``below``, read site by site.

    A kind that is missing here appeared after that reading, and so did whatever is done with it: it is an error.
    """

    first: tuple[int, int, int]
    below: tuple[int, int, int]
    rules: SiteRules


TESTED = (
    TestedVersions(
        first=(0, 16, 1),
        below=(0, 17, 0),
        rules=SiteRules(
            kinds=frozenset(
                {
                    Site.NAMESPACE,
                    Site.LITERAL,
                    Site.INDEXED_FSTRING,
                    Site.TENSOR_TYPE,
                    Site.DEVICE_CALL,
                    Site.MOVE,
                    Site.FROM_CUDA,
                    Site.IMPORT_AS,
                    Site.BINDING,
                }
            ),
            labels=frozenset({"torch.cuda.synchronize"}),  # names a timer in dist_checkpointing
        ),
    ),
)


def megatron_rules(version: str) -> SiteRules:
    """What this version of Megatron-Core is known to contain. Raises RetargetError for an untested one."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match:
        number = (int(match[1]), int(match[2]), int(match[3]))
        for entry in TESTED:
            if entry.first <= number < entry.below:
                return entry.rules
    tested = ", ".join(f">={_text(entry.first)},<{_text(entry.below)}" for entry in TESTED)
    raise RetargetError(
        f"megatron-core {version} is installed, and how it reaches CUDA is known for {tested} only. "
        f"Install a tested one (pip install 'megatron-core{tested}'), or read its sites and add them to "
        f"accel/retarget/sites.py."
    )


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
