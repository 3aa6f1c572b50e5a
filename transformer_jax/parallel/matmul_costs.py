"""Floating point operations of the matrix products and convolutions of a compiled program, 2 for a multiply-add."""

import re
from math import prod

import numpy as np

from transformer_jax.parallel.hlo import Computation, Instruction

_LIBRARY_PRODUCTS = ('__onednn$matmul', '__cublas$gemm', '__cublas$lt$matmul', '__cublas$lt$matmul$f8')


def count_product_flops(holder: Computation, instruction: Instruction) -> float:
    """Of one instruction; 0 for one that is neither."""
    if instruction.opcode == 'dot':
        return _dot_flops(holder, instruction, instruction.attributes)
    if instruction.opcode == 'convolution':
        return _convolution_flops(holder, instruction)
    target = instruction.attribute(r'custom_call_target="([^"]+)"')
    if instruction.opcode == 'custom-call' and target is not None and target.startswith(_LIBRARY_PRODUCTS):
        return _dot_flops(holder, instruction, instruction.attributes)
    return 0


def _dot_flops(holder: Computation, instruction: Instruction, attributes: str) -> float:
    left = holder.operand(instruction, 0)
    contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', attributes)
    if left is None:
        raise ValueError(f'{instruction.name} multiplies an array that its computation does not make')
    dims = left.shapes[0].dims
    if contracted is None:  # a library's product of two matrices says no more
        return 2.0 * prod(instruction.shapes[0].dims) * dims[-1]
    axes = [int(axis.strip('"')) for axis in contracted[1].split(',') if axis.strip('"')]
    return 2.0 * prod(instruction.shapes[0].dims) * prod(dims[axis] for axis in axes)


def _convolution_flops(holder: Computation, instruction: Instruction) -> float:
    """Multiplications by padding and by the zeros of a dilation are no multiplications.

    A TPU program has its batched matrix products as convolutions with just such windows.
    """
    labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
    left, right = holder.operand(instruction, 0), holder.operand(instruction, 1)
    if labels is None or left is None or right is None:
        raise ValueError(f'{instruction.name} is a convolution without dim_labels or operands')
    window = _read_window(instruction.attributes)
    left_dims = dict(zip(labels[1], left.shapes[0].dims, strict=True))
    right_dims = dict(zip(labels[2], right.shapes[0].dims, strict=True))
    out_dims = dict(zip(labels[3], instruction.shapes[0].dims, strict=True))
    # Batch groups: each output feature sees the rows of its group alone.
    groups = int(instruction.attribute(r'batch_group_count=(\d+)') or 1)
    total = 2.0 * (left_dims['b'] // groups) * right_dims['i'] * right_dims['o']
    spatial = sorted(label for label in labels[1] if label.isdigit())
    for number, label in enumerate(spatial):
        total *= _valid_pairs(left_dims[label], out_dims[label], {key: value[number] for key, value in window.items()})
    return total


def _read_window(attributes: str) -> dict[str, list]:
    found = re.search(r'window=\{([^}]*)\}', attributes)
    text = found[1] if found else ''
    fields = dict(part.split('=') for part in text.split())
    sizes = [int(size) for size in fields['size'].split('x')] if 'size' in fields else []

    def numbers(name: str) -> list[int]:
        return [int(n) for n in fields[name].split('x')] if name in fields else [1] * len(sizes)

    pads = [int(pad.split('_')[0]) for pad in fields['pad'].split('x')] if 'pad' in fields else [0] * len(sizes)
    return {
        'size': sizes,
        'stride': numbers('stride'),
        'pad': pads,
        'lhs_dilate': numbers('lhs_dilate'),
        'rhs_dilate': numbers('rhs_dilate'),
    }


def _valid_pairs(in_size: int, out_size: int, window: dict[str, int]) -> int:
    """How many pairs of a window place and an output place meet an element of the input, along one axis."""
    places = np.arange(window['size'])[:, None] * window['rhs_dilate'] - window['pad']
    reached = places + np.arange(out_size)[None] * window['stride']
    inside = (reached >= 0) & (reached < (in_size - 1) * window['lhs_dilate'] + 1)
    return int((inside & (reached % window['lhs_dilate'] == 0)).sum())
