"""What a device can do: one table for all that `plan` says of time and memory.

Sources. TPU: the "Key specifications" of the Cloud TPU documentation (pages v4, v5e, v5p and v6e), bf16. Its clock is
the one at which the matrix units reach that peak, 2 FLOPs a cell and cycle: 4 units of 128 x 128 cells in a v5e, 8 in a
v5p and a v4, 4 of 256 x 256 in a v6e; the compiler's own estimates of memory-bound programs agree with it. Interconnect
is what one chip receives over the two links of one torus axis: its bidirectional figure, halved, over the chip's axes.
A v4 chip is two devices to the compiler, each with half of it. GPU: the vendor's data sheets of the SXM (H100, H200,
A100) and PCIe cards (all others), dense bf16 (T4: fp16), boost clock, NVLink in one direction, else PCIe. CPU: nominal,
so that plans can be compared with each other: two 256-bit multiply-adds a cycle and core, and a share of two memory
channels.
"""

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device as the compiler sees it."""

    name: str
    memory: int | None  # bytes; None = a share of the machine's
    peak_flops: float  # a second, in the dtype that its matrix units are made for
    bandwidth: float  # bytes a second between it and its memory
    interconnect: float  # bytes a second that it receives from its neighbours
    clock: float  # cycles a second
    compiler_counts_cycles: bool = False
    scoped_vmem_kib: int | None = None  # of its fast memory, for one operation; None = as the compiler has it


# By how a device's kind begins; the first that fits.
CHIPS: dict[str, Chip] = {
    'TPU v6 lite': Chip('v6e', 32 * _GIB, 918e12, 1638e9, 200e9, 1.75e9, True),
    'TPU v5 lite': Chip('v5e', 16 * _GIB, 197e12, 819e9, 100e9, 1.5e9, True, scoped_vmem_kib=32768),
    'TPU v5': Chip('v5p', 95 * _GIB, 459e12, 2765e9, 200e9, 1.75e9, True),
    'TPU v4': Chip('v4', 16 * _GIB, 137.5e12, 614e9, 50e9, 1.05e9, True),
    'NVIDIA H200': Chip('H200', 141 * 10**9, 989.4e12, 4.8e12, 450e9, 1.83e9),
    'NVIDIA H100 PCIe': Chip('H100 PCIe', 80 * 10**9, 756e12, 2e12, 64e9, 1.755e9),
    'NVIDIA H100': Chip('H100', 80 * 10**9, 989.4e12, 3.35e12, 450e9, 1.83e9),
    'NVIDIA A100-SXM4-40GB': Chip('A100 40 GB', 40 * 10**9, 312e12, 1.555e12, 300e9, 1.41e9),
    'NVIDIA A100': Chip('A100 80 GB', 80 * 10**9, 312e12, 2.039e12, 300e9, 1.41e9),
    'NVIDIA A10': Chip('A10', 24 * 10**9, 125e12, 600e9, 32e9, 1.695e9),
    'NVIDIA L40S': Chip('L40S', 48 * 10**9, 362e12, 864e9, 32e9, 2.52e9),
    'NVIDIA L4': Chip('L4', 24 * 10**9, 121e12, 300e9, 32e9, 2.04e9),
    'NVIDIA GeForce RTX 4090': Chip('RTX 4090', 24 * 10**9, 165e12, 1.008e12, 32e9, 2.52e9),
    'Tesla T4': Chip('T4', 16 * 10**9, 65e12, 320e9, 16e9, 1.59e9),
    'cpu': Chip('one core of a CPU, nominal', None, 96e9, 10e9, 10e9, 3e9),
}

# TPU slices by generation, as they are offered.
_FLAT = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBES = ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8', '8x8x16', '8x16x16', '16x16x16')
TOPOLOGIES: dict[str, tuple[str, ...]] = {'v4': _CUBES, 'v5e': _FLAT, 'v5p': _CUBES, 'v6e': _FLAT}


def find_chip(device_kind: str) -> Chip | None:
    """The table's row for a device, or None for one that it lacks."""
    return next((chip for kind, chip in CHIPS.items() if device_kind.lower().startswith(kind.lower())), None)
