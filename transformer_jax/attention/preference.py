"""Which implementation of `dot` is best where: what `impl='auto'` stands for."""

from transformer_jax.attention.variant import Use

# Up to here the scores fit into caches, and computing them whole is the fastest on CPU (tests/benchmarks).
_SHORT = 512


def order_of_preference(use: Use) -> tuple[str, ...]:
    """The implementations, best first; a use runs with the first that supports it.

    The fused kernels of the platform come first. Without one, short texts are best served by `dense` and long ones by
    `blockwise`. A use that generates is counted by its longest text.
    """
    general = ('dense', 'blockwise') if use.max_length <= _SHORT else ('blockwise', 'dense')
    if use.platform == 'tpu':
        return ('pallas', *general)
    if use.platform == 'gpu':
        return ('cudnn', *general, 'pallas')
    return general
