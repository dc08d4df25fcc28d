"""Frozen matrices in 8 or 4 bits per element, in the formats of the library bitsandbytes.

A group of 64 neighbouring elements has one scale, their largest magnitude. The elements divided by
the scale are rounded to the values of a table: in 4 bits to NF4's 16 values (QLoRA, Dettmers et
al., arXiv 2305.14314), in 8 bits to 256 values with a dynamic exponent (Dettmers et al., arXiv
2110.02861).
"""

import functools
import importlib.metadata
import logging
import re
from typing import NamedTuple

import torch
from torch import Tensor

from training.host.errors import UserError, is_installed, pip_install

GROUP = 64  # elements that share a scale
LEAST_VERSION = 0, 50  # older ones may not run on the current stream


class Quantized(NamedTuple):
    """A matrix of n elements, row by row."""

    codes: Tensor  # uint8, [n] in 8 bits and [n / 2] in 4 bits
    scales: Tensor  # float32 [n / 64]
    bits: int  # 8 or 4

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @torch.no_grad()
    def write_into(self, matrix: Tensor) -> None:
        """Writes the elements into a contiguous float tensor, on the current stream."""
        library, flat = _library(), matrix.view(-1)
        codes, scales = (
            tensor.to(flat.device, non_blocking=True) for tensor in (self.codes, self.scales)
        )
        table = _table(flat.device) if self.bits == 8 else None
        state = library.QuantState(
            scales, flat.shape, table, GROUP, quant_type="nf4", dtype=flat.dtype
        )
        dequantize = library.dequantize_blockwise if self.bits == 8 else library.dequantize_4bit
        if self.bits == 4:
            # The library's shape; [1, n] it takes for a transposed matrix.
            codes = codes.view(-1, 1)
        if flat.is_cuda:
            dequantize(codes, state, out=flat)
        else:  # the library writes into a given tensor on GPUs alone
            flat.copy_(dequantize(codes, state).view(-1))


@torch.no_grad()
def quantize(elements: Tensor, bits: int) -> Quantized:
    """Returns elements [n], n a multiple of 64, in so many bits.

    On a GPU it must be on the default stream.
    """
    library = _library()
    if bits == 8:
        codes, state = library.quantize_blockwise(
            elements, _table(elements.device), blocksize=GROUP
        )
    else:
        codes, state = library.quantize_4bit(elements, blocksize=GROUP, quant_type="nf4")
    return Quantized(codes.view(-1), state.absmax, bits)


def check_library(user: str) -> None:
    """Raises UserError if the library is missing, too old or broken; `user` is what needs it, such
    as a flag."""
    if not is_installed("bitsandbytes"):
        raise UserError(f"{user} needs the package bitsandbytes: {pip_install('bitsandbytes')}")
    version = importlib.metadata.version("bitsandbytes")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise UserError(
            f"{user} needs bitsandbytes {least} or newer, got {version}: "
            f"{pip_install('-U bitsandbytes')}"
        )
    try:
        _library()
    except Exception as error:  # a package of it that is missing or does not fit
        raise UserError(
            f"{user} needs bitsandbytes, and {version} fails here: {error}; install it anew"
        ) from None


@functools.cache
def _library():
    """Imports bitsandbytes.functional, which takes seconds.

    Its warning about another `kernels` is not shown.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from bitsandbytes import functional

    return functional


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Returns the values of 8-bit codes, float32 [256]."""
    return _library().create_dynamic_map().to(device)
