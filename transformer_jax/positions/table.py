"""Reading a table that has one row a position."""

from transformer_jax.shapes import Array, Float, Int


def rows_at(table: Float[Array, 'L D'], positions: Int[Array, 'B T']) -> Float[Array, 'B T D']:
    """Row p of the table for position p.

    The host refuses texts longer than the table. Should one come through, its rows are NaN: an index that is clamped
    or that counts from the end would say nothing.
    """
    return table.at[positions].get(mode='fill', fill_value=float('nan'), wrap_negative_indices=False)
