"""Every kind with every position scheme: what the table allows equals float64 loops, and the rest is refused."""

import cmath
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.attention import comparing
from transformer_jax.attention import VARIANTS
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig, Config, ConfigError, ModelConfig
from transformer_jax.models import validate
from transformer_jax.overlay import overlay
from transformer_jax.positions import SCHEMES, rope
from transformer_jax.positions.alibi import AlibiTerms
from transformer_jax.positions.shaw import ShawTerms

N, K, H, U, CLIP, LONGEST = 2, 1, 4, 3, 2, 8
CONFIG = AttentionConfig(num_heads=N, num_kv_heads=K, head_dim=H, value_dim=U, rank=3, block_size=2)
ON_CPU = [key for key, variant in VARIANTS.items() if 'cpu' in variant.supports]
ROWS = [[1, 1, 1, 2, 2, 0], [0, 0, 1, 1, 3, 3]]
MASK = comparing.make_mask(ROWS, ROWS, causal=True, aligned=True)
TAKE_TERMS = [
    pytest.param(key, marks=[] if key[0] == 'dot' or key[1] == 'blockwise' else pytest.mark.slow, id='/'.join(key))
    for key in ON_CPU
    if 'positions' in VARIANTS[key].supports
]
REFUSED = {
    'rope': ('additive', 'concat', 'general', 'linear', 'low_rank'),
    **dict.fromkeys(('shaw', 't5', 'alibi'), ('linear', 'low_rank', 'performer')),
}
NO_BLEU = {'evaluation.bleu': False, 'evaluation.score': 'loss'}


def score(kind: str, q: np.ndarray, k: np.ndarray, params: dict[str, np.ndarray], head: int) -> float:
    """What the equation of a kind says of one query and one key, scale included."""
    if kind == 'dot':
        return q @ k / math.sqrt(H)
    if kind == 'general':
        return q @ params['query_map'][head] @ k / math.sqrt(H)
    if kind == 'additive':
        return params['score'][head] @ np.tanh(q @ params['query_map'][head] + k @ params['key_map'][head * K // N])
    return params['score'][head] @ np.tanh(np.concatenate([q, k]) @ params['joint_map'][head])


def turn(row: np.ndarray, position: int) -> np.ndarray:
    """Component i and i + H/2 as one complex number, times e^(i position theta)."""
    half = H // 2
    turned = [complex(row[i], row[i + half]) * cmath.exp(1j * position * 10_000.0 ** (-2 * i / H)) for i in range(half)]
    return np.array([z.real for z in turned] + [z.imag for z in turned])


def clip(offset: int) -> int:
    return min(max(offset, -CLIP), CLIP) + CLIP


def loops(kind: str, arrays: comparing.Arrays, *, rotary: bool = False) -> np.ndarray:
    """Attention of turned rows, or with Shaw's terms and ALiBi's where there are tables of offsets."""
    q, k, v = (arrays[name] for name in 'qkv')
    q_at, k_at = np.asarray(MASK.q_positions), np.asarray(MASK.k_positions)
    seen, output = comparing.visible(MASK), np.zeros((*q.shape[:3], U))
    for b, t, n in np.ndindex(q.shape[:3]):
        keys = np.flatnonzero(seen[b, t])
        if not len(keys):
            continue
        offsets = [int(k_at[b, s]) - int(q_at[b, t]) for s in keys]
        logits = []
        for s, offset in zip(keys, offsets, strict=True):
            row, key = q[b, t, n], k[b, s, n * K // N]
            if rotary:
                row, key = turn(row, int(q_at[b, t])), turn(key, int(k_at[b, s]))
            logit = score(kind, row, key, arrays, n)
            if 'offset_keys' in arrays:
                moved = row @ arrays['query_map'][n] if kind == 'general' else row
                logit += moved @ arrays['offset_keys'][clip(offset)] / math.sqrt(H)
                logit -= abs(offset) * 2.0 ** (-8 * (n + 1) / N)
            logits.append(logit)
        weights = np.exp(np.array(logits) - max(logits))
        for weight, s, offset in zip(weights / weights.sum(), keys, offsets, strict=True):
            output[b, t, n] += weight * v[b, s, n * K // N]
            if 'offset_values' in arrays:
                output[b, t, n] += weight * arrays['offset_values'][clip(offset)]
    return output


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShawAndAlibi:
    """A scheme with every hook: the terms of two."""

    shaw: ShawTerms

    def bias(self, q_positions: Any, k_positions: Any) -> Any:
        return AlibiTerms(N).bias(q_positions, k_positions)

    def score_term(self, q: Any, q_positions: Any, k_positions: Any) -> Any:
        return self.shaw.score_term(q, q_positions, k_positions)

    def output_term(self, weights: Any, q_positions: Any, k_positions: Any) -> Any:
        return self.shaw.output_term(weights, q_positions, k_positions)


def make_arrays(key: tuple[str, str], **more: tuple[int, ...]) -> comparing.Arrays:
    """Random q, k, v, the parameters of the kind, and `more`."""
    own, rng = VARIANTS[key].parameters, np.random.default_rng(5)
    shapes = {name: one.shape for name, one in own(CONFIG, LONGEST).items()} if own else {}
    drawn = {name: rng.normal(size=shape) for name, shape in (shapes | more).items()}
    return comparing.make_arrays(4, MASK, N, K, H, U) | drawn


def attend(key: tuple[str, str], arrays: dict[str, Any], terms: Any = None, config: AttentionConfig = CONFIG) -> Any:
    options = Options(config, H**-0.5, arrays, terms=terms)
    return VARIANTS[key].function(arrays['q'], arrays['k'], arrays['v'], MASK, options)[0]


def turn_rows(arrays: dict[str, Any], shift: int = 0) -> dict[str, Any]:
    """The queries and keys as rope turns them at positions `shift` later than the mask's."""
    places = {'q': MASK.q_positions, 'k': MASK.k_positions}
    turned = {name: rope.on_heads(ModelConfig(), arrays[name], at + shift) for name, at in places.items()}
    return arrays | turned


@pytest.mark.parametrize('impl', ['dense', 'blockwise'])
def test_attention_of_turned_rows_equals_the_loops(impl: str) -> None:
    arrays, key = make_arrays(('dot', impl)), ('dot', impl)
    comparing.assert_equals_loops(
        lambda a: attend(key, turn_rows(a)),
        lambda a: loops('dot', a, rotary=True),
        arrays,
        comparing.visible(MASK),
    )


@pytest.mark.parametrize('key', TAKE_TERMS)
def test_what_a_scheme_adds_equals_the_loops(key: tuple[str, str]) -> None:
    comparing.assert_equals_loops(
        lambda a: attend(key, a, ShawAndAlibi(ShawTerms(a['offset_keys'], a['offset_values']))),
        lambda a: loops(key[0], a),
        make_arrays(key, offset_keys=(2 * CLIP + 1, H), offset_values=(2 * CLIP + 1, U)),
        comparing.visible(MASK),
    )


@pytest.mark.parametrize('key', [key for key in ON_CPU if key[0] not in ('performer', 'low_rank')], ids='/'.join)
def test_turned_rows_know_offsets_alone_where_the_table_says_so(key: tuple[str, str]) -> None:
    arrays = {name: jnp.float32(array) for name, array in make_arrays(key).items()}
    run = jax.jit(lambda a: (attend(key, turn_rows(a)), attend(key, turn_rows(a, shift=31))))
    here, there = map(np.asarray, run(arrays))
    difference = np.abs(here - there).max()
    assert difference <= 2e-5 if 'rotary' in VARIANTS[key].supports else difference > 1e-2


def test_random_features_of_turned_rows_estimate_attention_of_turned_rows() -> None:
    arrays = make_arrays(('performer', 'chunked'))
    arrays |= {'q': arrays['q'] * 0.5, 'k': arrays['k'] * 0.5}
    expected, still = loops('dot', arrays, rotary=True), loops('dot', arrays)
    config = dataclasses.replace(CONFIG, num_features=2048)
    rows = {name: jnp.float32(array) for name, array in arrays.items()}
    ours = jax.jit(lambda a: attend(('performer', 'chunked'), turn_rows(a), config=config))(rows)
    oracles.assert_close(ours, expected, 0.02)
    assert np.abs(still - expected).max() > 0.05 * np.abs(expected).max()


@pytest.mark.parametrize('scheme', SCHEMES)
@pytest.mark.parametrize('kind', sorted({kind for kind, _ in ON_CPU}))
def test_each_pair_works_or_is_refused_with_what_works(kind: str, scheme: str) -> None:
    inside = {'family': 'encoder_only', 'attention.kind': kind, 'positions': scheme}
    config = overlay(Config(), {f'model.{name}': value for name, value in inside.items()} | NO_BLEU)
    if kind not in REFUSED.get(scheme, ()):
        validate(config)
        return
    feature = 'rotary' if scheme == 'rope' else 'positions'
    works = 'dot/dense, dot/blockwise, performer/chunked' if scheme == 'rope' else 'dot/dense, dot/blockwise, additive/'
    with pytest.raises(ConfigError, match=rf'encoder_self is kind {kind!r}.* {feature} \(.*working here: {works}'):
        validate(config)
