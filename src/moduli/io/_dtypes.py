"""What a safetensors file calls the dtypes of torch, and the bytes of a tensor."""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ._errors import CheckpointError

DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""Dtypes by the codes that stand for them in a file."""

# C64 is read where others wrote it; we write pairs, which every version of the safetensors library opens.
CODES: Final[dict[torch.dtype, str]] = {dtype: code for code, dtype in DTYPES.items() if not dtype.is_complex}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def describe_stored(tensor: Tensor, name: str) -> tuple[str, list[int]]:
    """The code and the shape under which a tensor is written.

    Raises:
        CheckpointError: If it is not a dense tensor with data, or of a dtype that a file cannot hold.
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        what = f"device {str(tensor.device)!r}, layout {tensor.layout}, {tensor.dtype}" + ", nested" * tensor.is_nested
        raise CheckpointError(
            f"{name!r} ({what}) cannot be saved: only dense tensors with data can; convert or remove it"
        )
    dtype, shape = tensor.dtype, list(tensor.shape)
    if dtype.is_complex:  # as pairs
        dtype, shape = dtype.to_real(), [*shape, 2]
    code = CODES.get(dtype)
    if code is None:
        raise CheckpointError(
            f"{name!r} has dtype {tensor.dtype}, which safetensors files do not have; convert it, or save "
            "tensor.view(torch.uint8)"
        )
    return code, shape


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they are written: its own memory where that is contiguous on the CPU, else a copy."""
    value = tensor.detach()
    if value.is_complex():
        # What is conjugated lazily is resolved by a copy, which is contiguous.
        value = torch.view_as_real(value.resolve_conj())
    value = value.resolve_neg().cpu().contiguous()
    raw: np.ndarray[Any, Any] = value.reshape(-1).view(torch.uint8).numpy()
    return raw.data
