"""Costs read from the text of compiled programs: small ones written by hand, and compiled ones of known products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.parallel.hlo import parse_program, parse_shapes
from transformer_jax.parallel.jaxpr_costs import UnknownTurnsError, count_flops, find_kernels
from transformer_jax.parallel.program_costs import read_costs

HEADER = 'HloModule jit_step, is_scheduled=true, num_partitions=8\n\n'
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def cycles(count: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


def make_loop(name: str, inner: str, limit: str = 'constant(5)', first: int = 0, step: int = 1) -> str:
    """Body and condition of a loop over `(counter, f32[7])` with `inner` in its body."""
    return f"""%{name}_body (p: (s32[], f32[7])) -> (s32[], f32[7]) {{
  %p = (s32[], f32[7]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[7]{{0}} get-tuple-element(%p), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
{inner}
  ROOT %out = (s32[], f32[7]{{0}}) tuple(%next, %x)
}}

%{name}_condition (p: (s32[], f32[7])) -> pred[] {{
  %p = (s32[], f32[7]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] {limit}
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}
"""


def make_entry(inner: str, first: int = 0) -> str:
    return f"""ENTRY %main (x: f32[7]) -> f32[7] {{
  %x = f32[7]{{0}} parameter(0)
  %zero = s32[] constant({first})
  %state = (s32[], f32[7]{{0}}) tuple(%zero, %x)
{inner}
  ROOT %result = f32[7]{{0}} copy(%x)
}}
"""


def loop_line(name: str, more: str = '') -> str:
    return f'  %{name} = (s32[], f32[7]{{0}}) while(%state), condition=%{name}_condition, body=%{name}_body{more}'


FUSED = """%fused (q: f32[7]) -> f32[7] {
  %q = f32[7]{0} parameter(0)
  ROOT %double = f32[7]{0} add(%q, %q)
}
"""


def fusion_line(name: str, count: int, operand: str = 'x') -> str:
    return f'  %{name} = f32[7]{{0}} fusion(%{operand}), kind=kLoop, calls=%fused, {cycles(count)}'


@pytest.mark.parametrize(
    ('first', 'step', 'limit', 'turns'), [(0, 1, 5, 5), (2, 1, 5, 3), (0, 2, 5, 3), (1, 3, 11, 4), (5, 1, 5, 0)]
)
def test_a_loop_counts_as_often_as_it_runs(first: int, step: int, limit: int, turns: int) -> None:
    loop = make_loop('loop', fusion_line('f', 1009), f'constant({limit})', step=step)
    costs = read_costs(HEADER + FUSED + loop + make_entry(loop_line('loop') + '\n' + fusion_line('g', 13), first))
    assert costs.compiler_cycles == turns * 1009 + 13
    assert not costs.bounded_loops


def test_what_the_compiler_knows_of_a_loop_is_taken() -> None:
    loop = make_loop('loop', fusion_line('f', 11), 'copy(%i)')
    known = ', backend_config={"known_trip_count":{"n":"17"}}'
    assert read_costs(HEADER + FUSED + loop + make_entry(loop_line('loop', known))).compiler_cycles == 17 * 11


def test_loops_calls_and_branches_inside_a_loop() -> None:
    inner = make_loop('inner', fusion_line('f', 100), 'constant(3)')
    called = f"""%called (y: f32[7]) -> f32[7] {{
  %y = f32[7]{{0}} parameter(0)
{fusion_line('c', 7, 'y')}
  ROOT %z = f32[7]{{0}} copy(%y)
}}
%cheap (y: f32[7]) -> f32[7] {{
  ROOT %y = f32[7]{{0}} parameter(0)
}}
"""
    body = '\n'.join([
        '  %zero = s32[] constant(0)',
        '  %state = (s32[], f32[7]{0}) tuple(%zero, %x)',
        loop_line('inner'),
        '  %twice = f32[7]{0} call(%x), to_apply=%called',
        '  %some = f32[7]{0} conditional(%i, %x, %x), branch_computations={%cheap, %called}',
    ])  # fmt: skip
    outer = make_loop('outer', body, 'constant(4)')
    costs = read_costs(HEADER + FUSED + inner + called + outer + make_entry(loop_line('outer')))
    assert costs.compiler_cycles == 4 * (3 * 100 + 7 + 7)


def test_a_loop_over_the_data_has_the_turns_of_its_blocks() -> None:
    body = '\n'.join([
        '  %table = f32[35,11]{1,0} constant({...})',
        '  %rows = f32[5,11]{1,0} dynamic-slice(%table, %i, %i), dynamic_slice_sizes={5,11}',
        fusion_line('f', 100),
    ])  # fmt: skip
    loop = make_loop('loop', body, 'get-tuple-element(%p), index=0')
    costs = read_costs(HEADER + FUSED + loop + make_entry(loop_line('loop')))
    assert costs.bounded_loops == {'loop': 7}
    assert costs.compiler_cycles == 7 * 100


def test_a_loop_that_nothing_tells_of_is_named() -> None:
    loop = make_loop('loop', fusion_line('f', 100), 'get-tuple-element(%p), index=0')
    assert read_costs(HEADER + FUSED + loop + make_entry(loop_line('loop'))).bounded_loops == {'loop': 1}


@pytest.mark.parametrize(
    ('opcode', 'result', 'groups', 'received'),
    [
        ('all-reduce', 'f32[7]{0}', '{{0,1,2,3},{4,5,6,7}}', 2 * 28 * 3 / 4),
        ('all-gather', 'f32[28]{0}', '[2,4]<=[8]', 28 * 3),
        ('all-gather', 'f32[14]{0}', "mesh['a'=4,'b'=2] {'b'}", 28),
        ('all-gather', 'f32[14]{0}', "mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a'}", 28),
        ('all-gather', 'f32[14]{0}', "mesh['a'=8] {'a':(1)2}", 28),
        ('reduce-scatter', 'f32[1]{0}', '{}', 28 * 7 / 8),
        ('all-to-all', 'f32[7]{0}', "mesh['a'=2,'b'=4] {'a','b'}", 28 * 7 / 8),
        ('collective-permute', 'f32[7]{0}', '{}', 28),
    ],
)
def test_what_a_collective_receives(opcode: str, result: str, groups: str, received: float) -> None:
    line = f'  %c = {result} {opcode}(%x), channel_id=1, replica_groups={groups}, to_apply=%add'
    (kind, one), *others = read_costs(HEADER + ADD + make_entry(line)).collectives.items()
    assert (kind, others) == (opcode, [])
    assert one == (1, received, received)


def test_groups_that_can_not_be_read_are_an_error() -> None:
    line = '  %c = f32[7]{0} all-reduce(%x), replica_groups=some<of>them, to_apply=%add'
    with pytest.raises(ValueError, match='some<of>them'):
        read_costs(HEADER + ADD + make_entry(line))


def test_a_collective_of_one_device_is_none() -> None:
    line = "  %c = f32[7]{0} all-reduce(%x), replica_groups=mesh['a'=8,'b'=1] {'b'}, to_apply=%add"
    assert read_costs(HEADER + ADD + make_entry(line)).collectives == {}


def test_the_start_and_the_end_of_a_collective_are_one_that_overlaps() -> None:
    start = '  %s = (f32[7]{0}, f32[28]{0}) all-gather-start(%x), channel_id=3, replica_groups=[2,4]<=[8]'
    loop = make_loop('loop', f'{start}\n  %d = f32[28]{{0}} all-gather-done(%s)', 'constant(6)')
    costs = read_costs(HEADER + loop + make_entry(loop_line('loop')))
    assert costs.collectives == {'all-gather': (6, 6 * 84, 0)}


def test_the_fusions_that_share_a_channel_are_one_collective() -> None:
    parts = ''.join(
        f"""%part{n} (q: f32[7]) -> f32[28] {{
  %q = f32[7]{{0}} parameter(0)
  ROOT %g = f32[28]{{0}} all-gather(%q), channel_id={channel}, replica_groups=[2,4]<=[8]
}}
"""
        for n, channel in enumerate((5, 5, 5, 8))
    )
    lines = [f'  %f{n} = f32[28]{{0}} fusion(%x), kind=kCustom, calls=%part{n}' for n in range(4)]
    costs = read_costs(HEADER + parts + make_entry('\n'.join(lines)))
    assert costs.collectives == {'all-gather': (2, 2 * 84, 0)}


def test_equal_channels_of_two_loops_are_two_collectives() -> None:
    part = """%part (q: f32[7]) -> f32[28] {
  %q = f32[7]{0} parameter(0)
  ROOT %g = f32[28]{0} all-gather(%q), channel_id=1, replica_groups=[2,4]<=[8]
}
"""
    line = '  %f = f32[28]{0} fusion(%x), kind=kCustom, calls=%part'
    loops = make_loop('one', line, 'constant(3)') + make_loop('two', line, 'constant(5)')
    costs = read_costs(HEADER + part + loops + make_entry(loop_line('one') + '\n' + loop_line('two')))
    assert costs.collectives == {'all-gather': (8, 8 * 84, 0)}


def test_a_sum_of_which_each_device_keeps_its_part() -> None:
    part = """%all-reduce-scatter.3 (q: f32[8]) -> f32[2] {
  %q = f32[8]{0} parameter(0)
  %s = f32[8]{0} all-reduce(%q), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %own = f32[2]{0} dynamic-slice(%s, %q), dynamic_slice_sizes={2}
}
"""
    entry = make_entry('  %y = f32[8]{0} constant({...})\n  %f = f32[2]{0} fusion(%y), calls=%all-reduce-scatter.3')
    assert read_costs(HEADER + ADD + part + entry).collectives == {'reduce-scatter': (1, 24, 24)}


def test_a_computation_of_another_thread_is_called() -> None:
    called = f"""%called (y: f32[7]) -> f32[7] {{
  %y = f32[7]{{0}} parameter(0)
{fusion_line('c', 7, 'y')}
  ROOT %z = f32[7]{{0}} copy(%y)
}}, execution_thread="sparsecore"

"""
    lines = '  %s = ((f32[7]{0}), f32[7]{0}) call-start(%x), to_apply=%called\n  %d = f32[7]{0} call-done(%s)'
    assert read_costs(HEADER + FUSED + called + make_entry(lines)).compiler_cycles == 7


def test_a_wrapped_collective_overlaps() -> None:
    wrapped = """%wrapped (q: f32[7]) -> f32[7] {
  %q = f32[7]{0} parameter(0)
  ROOT %g = f32[7]{0} all-to-all(%q), channel_id=5, replica_groups=[2,4]<=[8]
}
"""
    lines = '\n'.join([
        '  %s = ((f32[7]{0}), f32[7]{0}) async-start(%x), calls=%wrapped',
        '  %d = f32[7]{0} async-done(%s)',
    ])  # fmt: skip
    assert read_costs(HEADER + wrapped + make_entry(lines)).collectives == {'all-to-all': (1, 21, 0)}


def test_a_custom_kernel_over_several_lines() -> None:
    kernel = (
        '  %my_kernel.3 = (bf16[7,11]{1,0:T(8,128)(2,1)S(1)}, f32[5]{0}) custom-call(%x), '
        'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n\n"xprof_metadata":"{}"\n}}, '
        'backend_config={"custom_call_config":{"body":"TUz("}}'
    )
    other = '  %other = f32[7]{0} custom-call(%x), custom_call_target="AllocateBuffer"'
    loop = make_loop('loop', f'{kernel}\n{other}', 'constant(3)')
    (one,) = read_costs(HEADER + loop + make_entry(loop_line('loop'))).kernels
    assert (one.name, one.calls) == ('my_kernel', 3)
    assert one.results == (('bf16', (7, 11)), ('f32', (5,)))
    assert one.num_bytes == 7 * 11 * 2 + 5 * 4 + 7 * 4


def test_bytes_are_those_that_move_to_and_from_memory() -> None:
    fused = """%cut (whole: f32[6,35], i: s32[]) -> f32[1,35] {
  %whole = f32[6,35]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %row = f32[1,35]{1,0} dynamic-slice(%whole, %i, %i), dynamic_slice_sizes={1,35}
}
%put (whole: f32[6,35], row: f32[1,35], i: s32[]) -> f32[6,35] {
  %whole = f32[6,35]{1,0} parameter(0)
  %row = f32[1,35]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %new = f32[6,35]{1,0} dynamic-update-slice(%whole, %row, %i, %i)
}
"""
    entry = """ENTRY %main (w: f32[6,35]) -> f32[6,35] {
  %w = f32[6,35]{1,0} parameter(0)
  %i = s32[]{:S(6)} constant(2)
  %row = f32[1,35]{1,0:T(8,128)S(1)} fusion(%w, %i), kind=kLoop, calls=%cut
  %on_chip = f32[1,35]{1,0:T(8,128)S(1)} negate(%row)
  ROOT %new = f32[6,35]{1,0} fusion(%w, %on_chip, %i), kind=kLoop, calls=%put
}
"""
    assert read_costs(HEADER + fused + entry).num_bytes == 35 * 4 + 35 * 4


def test_what_the_compiler_has_no_estimate_of_counts_by_its_bytes() -> None:
    lines = fusion_line('f', 2**63 - 1) + '\n' + fusion_line('g', 19)
    costs = read_costs(HEADER + FUSED + make_entry(lines))
    assert costs.compiler_cycles == 19
    assert costs.unestimated_bytes == 2 * 7 * 4


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match='ENTRY'):
        parse_program('not a program')


def test_shapes_of_every_width() -> None:
    shapes = parse_shapes('(pred[3]{0}, bf16[2,5]{1,0:T(8,128)(2,1)}, (s4[6], f8e4m3fn[7]{0:S(1)}), token[])')
    assert [shape.num_bytes for shape in shapes] == [3, 20, 3, 7, 0]
    assert [shape.on_chip for shape in shapes] == [False, False, False, True, False]


WINDOWS = [
    # batch, in features, out features, input, kernel, stride, padding, input dilation, kernel dilation
    (3, 5, 7, 13, 4, 1, (0, 0), 1, 1),
    (2, 5, 3, 11, 3, 2, (1, 2), 1, 1),
    (2, 3, 5, 7, 5, 1, (4, 4), 1, 1),
    (2, 3, 5, 5, 3, 1, (2, 1), 3, 2),
]


@pytest.mark.parametrize('window', WINDOWS)
def test_a_convolution_multiplies_what_is_no_padding(window: tuple) -> None:
    batch, features, out, size, kernel, stride, pad, dilation, kernel_dilation = window
    positions = [k * kernel_dilation - pad[0] for k in range(kernel)]
    length = ((size - 1) * dilation + 1 + sum(pad) - (kernel - 1) * kernel_dilation - 1) // stride + 1
    pairs = 0
    for place in range(length):
        for position in positions:
            at = place * stride + position
            pairs += 0 <= at <= (size - 1) * dilation and at % dilation == 0
    line = (
        f'  %c = f32[{batch},{length},{out}]{{2,1,0}} convolution(%a, %b), window={{size={kernel} stride={stride} '
        f'pad={pad[0]}_{pad[1]} lhs_dilate={dilation} rhs_dilate={kernel_dilation}}}, dim_labels=b0f_0io->b0f'
    )
    arrays = (
        f'  %a = f32[{batch},{size},{features}]{{2,1,0}} constant({{...}})\n'
        f'  %b = f32[{kernel},{features},{out}]{{2,1,0}} constant({{...}})\n'
    )
    assert read_costs(HEADER + make_entry(arrays + line)).flops == 2 * pairs * batch * features * out


def layers(x: jax.Array, w: jax.Array) -> jax.Array:
    """Five products of 16 x 11 by 11 x 11, in a loop."""
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def toy(x: jax.Array, w: jax.Array) -> jax.Array:
    """The layers, and then the products of all pairs of rows."""
    x = layers(x, w)
    return x @ x.T


ARRAYS = jax.ShapeDtypeStruct((16, 11), jnp.float32), jax.ShapeDtypeStruct((5, 11, 11), jnp.float32)
TOY_FLOPS = 2 * (5 * 16 * 11 * 11 + 16 * 16 * 11)


def test_a_compiled_toy() -> None:
    compiled = jax.jit(toy).lower(*ARRAYS).compile()
    assert read_costs(compiled.as_text()).flops == TOY_FLOPS


def test_a_compiled_toy_on_eight_devices() -> None:
    mesh = Mesh(np.array(jax.devices()), ('data',), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, PartitionSpec('data')), NamedSharding(mesh, PartitionSpec())
    x, w = ARRAYS
    split = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)

    def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: layers(x, w).sum())(w)

    w = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=whole)
    costs = read_costs(jax.jit(gradient, out_shardings=whole).lower(w, split).compile().as_text())
    size = 4 * w.size
    assert set(costs.collectives) == {'all-reduce'}
    assert costs.collectives['all-reduce'].num_bytes == pytest.approx(2 * size * 7 / 8, rel=0.01)
    assert costs.flops == 3 * 2 * 5 * 2 * 11 * 11  # two rows a device, forward and twice backward


def test_products_of_a_traced_function() -> None:
    assert count_flops(jax.make_jaxpr(toy)(*ARRAYS)) == TOY_FLOPS

    def choose(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: (x @ x.T) @ (x @ x.T), x)

    assert count_flops(jax.make_jaxpr(choose)(ARRAYS[0])) == 2 * (2 * 16 * 16 * 11 + 16**3)
    endless = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x))
    with pytest.raises(UnknownTurnsError, match='how often'):
        count_flops(endless(jax.ShapeDtypeStruct((3, 3), jnp.float32)))


def test_products_of_a_kernel_are_those_of_each_place_of_its_grid() -> None:
    from jax.experimental import pallas as pl

    def kernel(x: object, y: object, out: object) -> None:
        @pl.when(pl.program_id(0) >= 0)
        def _() -> None:
            out[...] = x[...] @ y[...]

    def call(x: jax.Array, y: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 16), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((8, 16), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((32, 16), jnp.bfloat16),
            name='product',
        )(x, y)

    arrays = jnp.zeros((32, 16), jnp.bfloat16), jnp.zeros((16, 16), jnp.bfloat16)
    found = find_kernels(jax.make_jaxpr(jax.jit(call))(*arrays))
    assert found == {('product', (('bf16', (32, 16)),)): 4 * 2 * 8 * 16 * 16}
