"""Every kind of attention, and the other ways to mix tokens, on the built-in task.

A sweep names the config that its points change, and yields each point as a name and the fields that it sets.

Base:      configs/quickstart.py
Points:    one training each, about 2 minutes on 2 CPU cores
"""

from collections.abc import Iterator
from typing import Any

BASE = 'configs/quickstart.py'


def points() -> Iterator[tuple[str, dict[str, Any]]]:
    attention = 'model.attention'
    yield 'dot', {}
    yield 'dot, unscaled', {f'{attention}.scale': None}
    yield 'dot, 2 key-value heads', {f'{attention}.num_kv_heads': 2}
    yield 'dot, 1 key-value head', {f'{attention}.num_kv_heads': 1}
    yield 'dot, blockwise', {f'{attention}.impl': 'blockwise'}
    yield 'window 8', {f'{attention}.window': 8}
    yield 'window 8, 2 global', {f'{attention}.window': 8, f'{attention}.num_global': 2}
    yield 'linear', {f'{attention}.kind': 'linear'}
    yield 'performer', {f'{attention}.kind': 'performer'}
    # Low-rank attention can be neither causal nor packed.
    yield (
        'low_rank',
        {
            'model.encoder_self.kind': 'low_rank',
            'model.cross.kind': 'low_rank',
            f'{attention}.rank': 16,
            'data.batching': 'buckets',
        },
    )
    yield 'additive', {f'{attention}.kind': 'additive'}
    yield 'general', {f'{attention}.kind': 'general'}
    yield 'concat', {f'{attention}.kind': 'concat'}
    yield 'recurrence', {'model.encoder_mixing': 'recurrence', 'model.decoder_mixing': 'recurrence'}
    yield 'convolution', {'model.encoder_mixing': 'convolution', 'model.decoder_mixing': 'convolution'}
