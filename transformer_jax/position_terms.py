"""What a position scheme may add inside attention: terms that depend on the positions of a query and of a key."""

from typing import Protocol, runtime_checkable

from transformer_jax.shapes import Array, Float, Int


@runtime_checkable
class PositionTerms(Protocol):
    """Met by the pytrees in `positions/` that hold a scheme's parameters; attention knows nothing else of a scheme.

    Each hook is given the positions of one block of queries and keys, so that nothing of size `[T, S]` need exist and a
    cached one-row query and a full forward pass agree. `q` and `weights` may be of a part of the heads, where devices
    split them; a bias is of all. A hook that the scheme does not have returns None.
    """

    def bias(self, q_positions: Int[Array, 'B T'], k_positions: Int[Array, 'B S']) -> Float[Array, '#B N T S'] | None:
        """Added to the scaled logits."""
        ...

    def score_term(
        self, q: Float[Array, 'B T N H'], q_positions: Int[Array, 'B T'], k_positions: Int[Array, 'B S']
    ) -> Float[Array, 'B N T S'] | None:
        """Added to q k^T before it is scaled."""
        ...

    def output_term(
        self, weights: Float[Array, 'B N T S'], q_positions: Int[Array, 'B T'], k_positions: Int[Array, 'B S']
    ) -> Float[Array, 'B T N U'] | None:
        """Added to the weighted sum of values; linear in `weights`."""
        ...
