"""The compatibility of all variants as a table for the documentation, made from what each declares."""

from transformer_jax.attention import VARIANTS
from transformer_jax.attention.variant import FEATURES

_ALWAYS = ('cpu', 'gpu', 'tpu', 'float32', 'bfloat16')  # told in words, not in columns


def compatibility_table() -> str:
    """Markdown: a row for each (kind, impl), a column for each feature, `x` where it is supported."""
    columns = [feature for feature in FEATURES if feature not in _ALWAYS]
    lines = ['| kind | impl | ' + ' | '.join(columns) + ' | runs on | computes in |']
    lines.append('|---' * (len(columns) + 4) + '|')
    for (kind, impl), variant in VARIANTS.items():
        marks = ['x' if feature in variant.supports else '' for feature in columns]
        platforms = [name for name in ('cpu', 'gpu', 'tpu') if name in variant.supports]
        dtypes = [name for name in ('float32', 'bfloat16') if name in variant.supports]
        cells = [kind, impl, *marks, ' '.join(platforms), ' '.join(dtypes)]
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)
