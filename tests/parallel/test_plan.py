"""What a program takes of each device: the arithmetic, and the table of devices."""

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from transformer_jax.config import ConfigError
from transformer_jax.parallel import targets
from transformer_jax.parallel.chips import CHIPS, TOPOLOGIES, Chip, find_chip
from transformer_jax.parallel.plan import DoesNotFitError, account, compile_program
from transformer_jax.parallel.platform import compiling_for, target_platform
from transformer_jax.parallel.program_costs import Collective, Kernel, ProgramCosts
from transformer_jax.parallel.targets import Target

CHIP = Chip('made up', 2**30, peak_flops=1000.0, bandwidth=100.0, interconnect=10.0, clock=7.0)
COUNTING = dataclasses.replace(CHIP, compiler_counts_cycles=True)
COMPILED = SimpleNamespace(
    memory_analysis=lambda: SimpleNamespace(
        argument_size_in_bytes=101, output_size_in_bytes=103, alias_size_in_bytes=97, temp_size_in_bytes=59
    )
)
RESULTS = (('bf16', (3, 5)),)
COSTS = ProgramCosts(
    compiler_cycles=70,
    flops=3000.0,
    num_bytes=200.0,
    unestimated_bytes=40.0,
    kernels=(Kernel('fast', (), RESULTS, num_bytes=13, calls=3), Kernel('wide', (), RESULTS, num_bytes=50, calls=2)),
    collectives={'all-gather': Collective(2, 40.0, 0.0), 'all-reduce': Collective(1, 30.0, 30.0)},
    bounded_loops={'loop': 7},
)
FLOPS = {('fast', RESULTS): 150.0, ('wide', RESULTS): 100.0}


def test_a_plan_adds_compiler_kernels_and_waiting() -> None:
    plan = account(COSTS, FLOPS, COMPILED, COUNTING, 1.5)
    kernels = 3 * 150 / 500 + 2 * 50 / 100  # at half the peak, and at the bandwidth
    computing = 70 / 7 + 40 / 100 + kernels
    assert plan.kernel_cycles == pytest.approx(7 * kernels)
    assert plan.collective_cycles == pytest.approx(7 * 3)  # 40 bytes behind more computing, 30 in the way
    assert plan.step_seconds == pytest.approx(computing + 3)
    assert plan.estimated_cycles == pytest.approx(7 * (computing + 3))
    assert plan.flops == 3000 + 3 * 150 + 2 * 100
    assert plan.num_bytes == 200 + 3 * 13 + 2 * 50
    assert (plan.argument_bytes, plan.temporary_bytes, plan.output_bytes) == (101, 59, 6)
    assert plan.peak_bytes == 101 + 59 + 6
    assert [note for note in plan.notes if 'loop' in note and '7' in note]


def test_overlapped_collectives_count_as_far_as_they_take_longer() -> None:
    slow = dataclasses.replace(COUNTING, interconnect=1.0)
    plan = account(COSTS, FLOPS, COMPILED, slow, 1.5)
    computing = 70 / 7 + 40 / 100 + 3 * 150 / 500 + 2 * 50 / 100
    assert plan.step_seconds == pytest.approx(computing + 30 + (40 - computing))


def test_without_cycles_of_the_compiler_peak_and_bandwidth_tell() -> None:
    plan = account(dataclasses.replace(COSTS, compiler_cycles=0), FLOPS, COMPILED, CHIP, 1.5)
    assert plan.step_seconds == pytest.approx(max(3000 / 1000, 200 / 100) + 3 * 150 / 500 + 2 * 50 / 100 + 3)


def test_an_unknown_device_has_no_time() -> None:
    plan = account(COSTS, FLOPS, COMPILED, None, 1.5)
    assert plan.step_seconds is plan.estimated_cycles is plan.kernel_cycles is None
    assert plan.flops == 3650


def test_a_kernel_whose_products_are_not_known_is_named() -> None:
    plan = account(COSTS, {('fast', RESULTS): None, ('wide', RESULTS): 100.0}, COMPILED, COUNTING, 1.5)
    assert [note for note in plan.notes if 'fast' in note]
    assert not [note for note in plan.notes if 'wide' in note]
    assert plan.kernel_cycles == pytest.approx(7 * (3 * 13 / 100 + 2 * 50 / 100))


def test_the_compilers_refusal_is_read() -> None:
    message = (
        'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO '
        'temporaries (96.00G) exceeds available HBM (15.75G). HLO module: jit_step.\nmore'
    )

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            if name == 'compile':
                raise jax.errors.JaxRuntimeError(message)
            return lambda *_: self

    mesh = jax.sharding.Mesh(jax.devices()[:1], ('data',))
    with pytest.raises(DoesNotFitError, match='96.00G') as caught:
        compile_program(Refusing(), (), Target('cpu:1', tuple(jax.devices()[:1]), None), mesh)
    assert (caught.value.needed, caught.value.available) == (96 * 2**30, 15.75 * 2**30)


def test_matrix_units_reach_the_peak_at_the_clock() -> None:
    cells = {'v4': 4 * 128**2, 'v5e': 4 * 128**2, 'v5p': 8 * 128**2, 'v6e': 4 * 256**2}
    for chip in CHIPS.values():
        if chip.name in cells:
            assert 2 * cells[chip.name] * chip.clock == pytest.approx(chip.peak_flops, rel=0.01)
            assert chip.name in TOPOLOGIES


@pytest.mark.parametrize(
    ('kind', 'name'),
    [('TPU v5 lite', 'v5e'), ('TPU v5', 'v5p'), ('NVIDIA H100 80GB HBM3', 'H100')]
    + [('NVIDIA H100 PCIe', 'H100 PCIe'), ('NVIDIA L40S', 'L40S'), ('NVIDIA L4', 'L4'), ('cpu', None)],
)
def test_devices_are_found_by_their_kind(kind: str, name: str | None) -> None:
    chip = find_chip(kind)
    assert chip is not None
    assert name in (None, chip.name)
    assert find_chip('abacus') is None


@pytest.mark.parametrize('name', ['v5e:4x5', 'v9e:4x4', 'v5e', '4x4', 'v5p:4x4'])
def test_a_topology_that_there_is_not_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r'v5e: 1x1.*16x16; v5p: 2x2x1') as caught:
        targets.check_topology(name)
    assert repr(name) in str(caught.value)


def test_a_missing_compiler_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ConfigError, match=r'libtpu.*\[tpu\]'):
        targets.check_topology('v5e:4x4')


@pytest.mark.parametrize('name', ['cpu', 'cpu:0', 'cpu:x', 'tpu:4', 'v5e:4x4'])
def test_devices_that_there_are_not_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match='cpu:8 or gpu:1'):
        targets.parse_devices(name)


def test_more_devices_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match='has 8'):
        targets.open_devices('cpu:9')
    eight = targets.open_devices('cpu:8')
    assert targets.first_devices(eight, 3) == eight.devices[:3]
    with pytest.raises(ConfigError, match='takes 9 devices, but cpu:8 has 8'):
        targets.first_devices(eight, 9)


def test_the_environment_is_that_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
    environment: dict[str, str] = {}
    targets.prepare_environment(environment, 'v5e:4x4', None)
    assert environment['JAX_PLATFORMS'] == 'cpu'
    assert environment['TPU_SKIP_MDS_QUERY'] == '1'
    environment = {}
    targets.prepare_environment(environment, None, 'cpu:3')
    assert environment == {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '3'}


def test_programs_are_made_for_where_they_run() -> None:
    assert target_platform() == 'cpu'
    with compiling_for('tpu'):
        assert target_platform() == 'tpu'
    assert target_platform() == 'cpu'
