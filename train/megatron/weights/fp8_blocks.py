"""FP8 weights with one scale for each block, as DeepSeek-V3 published them and Qwen3 and GLM followed.

``NAME`` holds float8 and ``NAME_scale_inv`` what each 128 x 128 block is multiplied by; blocks at the edges are cut.
"""

from __future__ import annotations

from typing import Any

import torch

from samples.errors import InputError

SUFFIX = "_scale_inv"
BLOCK = (128, 128)
STORED_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_LARGEST = 448.0  # of float8_e4m3fn


def block_size(quantization: Any, source: str) -> tuple[int, int]:
    """Rows and columns of a block by a config's ``quantization_config``.

    Raises InputError, naming ``source``, for any other way of quantising. A missing ``fmt`` means e4m3.
    """
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if method != "fp8" or size is None:
        raise InputError(
            f"{source}: the checkpoint is quantised (quantization_config={quantization!r}); read are FP8 weights with "
            "a scale for each block (quant_method fp8 with weight_block_size), mxfp4, and unquantised weights"
        )
    if quantization.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise InputError(f"{source}: quantization_config fmt={quantization['fmt']!r} is not supported; e4m3 is")
    valid = isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if not valid:
        raise InputError(f"{source}: weight_block_size={size!r} in quantization_config has to be [rows, columns]")
    return int(size[0]), int(size[1])


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """Shape of the scales of a weight [rows, columns]."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def dequantise(
    part: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK, *, row: int = 0, column: int = 0
) -> torch.Tensor:
    """float32 [rows, columns] of a part that begins at ``row`` and ``column`` of its weight; ``scales``: the weight's.

    Zeros are zeros whatever their block's scale is: some writers divide by zero in a block of nothing but them.
    """
    rows = torch.arange(row, row + part.shape[0], device=part.device) // block[0]
    columns = torch.arange(column, column + part.shape[1], device=part.device) // block[1]
    wide = part.float()
    scaled = wide * scales.float().to(part.device)[rows][:, columns]
    return scaled.masked_fill_(wide == 0, 0.0)


def quantise(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn and float32 scales of a weight [rows, columns].

    A block of zeros, or of values too small for a scale, gets the scale 1.
    """
    rows, columns = weight.shape
    down, across = scale_shape((rows, columns), block)
    wide = torch.nn.functional.pad(weight.float(), (0, across * block[1] - columns, 0, down * block[0] - rows))
    blocks = wide.view(down, block[0], across, block[1])
    largest = blocks.abs().amax(dim=(1, 3))
    scales = largest / _LARGEST
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    narrow = (blocks / scales[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return narrow.view(down * block[0], across * block[1])[:rows, :columns].contiguous(), scales
