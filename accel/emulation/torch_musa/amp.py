"""Mixed precision under the names of torch_musa."""

from __future__ import annotations

from functools import partial

import torch

autocast = partial(torch.amp.autocast, "musa")
GradScaler = partial(torch.amp.GradScaler, "musa")
