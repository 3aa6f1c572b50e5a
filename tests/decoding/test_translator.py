"""From lines to lines: order, blank and over-long lines, prefixes, limits, and independence of the batch."""

import jax
import numpy as np
import pytest

from tests.decoding.toy_models import (
    BOS,
    EOS,
    PAD,
    TableModel,
    WordVocabulary,
    list_outputs,
    make_translator,
    random_sources,
    sentence_of,
)
from transformer_jax.config import ConfigError, DecodingConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.decoding.width import count_bytes

VOCAB = 11


@pytest.fixture(scope='module')
def model() -> TableModel:
    return TableModel(vocab_size=VOCAB, num_sentences=31)


@pytest.fixture(scope='module')
def params(model):
    return model.init(jax.random.key(1))


@pytest.mark.parametrize(
    'method', ['beam', *(pytest.param(method, marks=pytest.mark.slow) for method in ('greedy', 'sampling'))]
)
def test_batch_size_order_and_neighbours_change_nothing(model, params, method):
    sources = random_sources(70, 1, longest=20, vocab_size=VOCAB)
    rng = jax.random.key(4)
    expected = None
    for batch_size in (1, 7, 64):
        translator = make_translator(model, params, method=method, batch_size=batch_size, max_extra_length=12)
        found = translator.translate_n_best(sources, 1, rng=rng)
        expected = expected or found
        assert [best[0].ids for best in found] == [best[0].ids for best in expected]
        np.testing.assert_allclose([b[0].score for b in found], [b[0].score for b in expected], atol=1e-4)
    order = np.random.default_rng(0).permutation(len(sources))
    shuffled = translator.translate([sources[place] for place in order], rng=rng)
    assert shuffled == [expected[place][0].text for place in order]
    assert translator.translate(sources[5:9], rng=rng) == [best[0].text for best in expected[5:9]]
    assert len({best[0].ids for best in expected}) > 10


def test_blank_lines_stay_blank_and_are_not_decoded(model, params):
    sources = random_sources(3, 2, vocab_size=VOCAB)
    translator = make_translator(model, params)
    alone = translator.translate(sources)
    mixed = ['', sources[0], ' \t', sources[1], sources[2], '\u3000']
    assert translator.translate(mixed) == ['', alone[0], '', alone[1], alone[2], '']
    assert translator.counts.blank == 3
    assert translator.counts.lines == 9
    assert translator.translate_n_best(['  '], 2) == [[]]
    assert translator.translate([]) == []


def test_an_over_long_line_is_cut_counted_and_reported(model, params):
    said = []
    translator = Translator(model, params, WordVocabulary(VOCAB), DecodingConfig(), report=said.append)
    exact = ' '.join(['w4'] * (model.max_length - 1))  # with eos as long as can be
    found = translator.translate(['w5', exact + ' w4' * 5_000, 'w6', exact])
    assert translator.counts.cut == 1
    assert found[1] == found[3]
    assert [found[0], found[2]] == translator.translate(['w5', 'w6'])
    assert sum('1 source line was longer than 64 subwords' in line for line in said) == 1


def test_forced_prefixes_begin_the_translation_and_are_not_scored(model, params):
    sources = random_sources(30, 3, vocab_size=VOCAB)
    rng = np.random.default_rng(3)
    prefixes = [' '.join(f'w{word}' for word in rng.integers(4, VOCAB, rng.integers(0, 6))) for _ in sources]
    translator = make_translator(model, params, beam_size=3, max_extra_length=20)
    found = translator.translate_n_best(sources, 3, prefixes=prefixes)
    assert '' in prefixes
    for source, prefix, best in zip(sources, prefixes, found, strict=True):
        forced = tuple(int(word[1:]) for word in prefix.split())
        whole = translator.score([source] * 3, [spell(one.ids) for one in best])
        for one, rescored in zip(best, whole, strict=True):
            assert one.ids[: len(forced)] == forced
            assert one.ids == rescored.ids
            assert one.length == len(one.ids) - len(forced) + one.finished
            assert one.score == pytest.approx(one.log_probability / ((5 + one.length) / 6) ** 0.6, abs=1e-6)
            if one.finished:
                before = prefix_log_probability(model, params, source, forced)
                assert one.log_probability == pytest.approx(rescored.log_probability - before, abs=1e-4)
    assert translator.translate(sources, prefixes=[''] * len(sources)) == translator.translate(sources)


def spell(ids):
    return ' '.join(f'w{token}' for token in ids)  # the text of a translation leaves unk out


def prefix_log_probability(model, params, source, forced):
    table = np.asarray(params['table'], np.float64)[sentence_of(model, source)]
    log_p = table - np.log(np.exp(table).sum(-1, keepdims=True))
    past = (0, BOS, *forced)
    return sum(log_p[t % model.num_positions, past[t], past[t + 1], token] for t, token in enumerate(forced))


def test_a_prefix_with_a_wide_beam_is_exhaustive_search_of_what_follows():
    model = TableModel(vocab_size=5, num_sentences=7)
    params = model.init(jax.random.key(2))
    translator = make_translator(model, params, longest=6, beam_size=24, alpha=0.6)
    best = translator.translate_n_best(['w4 w2'], 1, prefixes=['w2 w4'])[0][0]
    outputs = list_outputs(model, params, sentence_of(model, 'w4 w2'), 4, prefix=(2, 4))
    tokens, total, length, _ = max(
        (output for output in outputs if output[3]), key=lambda output: output[1] / ((5 + output[2]) / 6) ** 0.6
    )
    assert (best.ids, best.length) == ((2, 4, *tokens), length)
    assert best.log_probability == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize('method', ['greedy', 'beam', pytest.param('sampling', marks=pytest.mark.slow)])
def test_limits_on_length_hold_and_specials_never_come(model, params, method):
    eager = dict(params, table=params['table'].at[..., [PAD, BOS]].add(4.0).at[..., EOS].add(2.0))
    sources = random_sources(40, 5, longest=12, vocab_size=VOCAB)
    for min_length, prefix in ((0, ''), (6, 'w4 w5')):
        translator = make_translator(model, eager, method=method, min_length=min_length, max_extra_length=2)
        found = translator.translate_n_best(sources, 1, prefixes=[prefix] * len(sources))
        assert any(best[0].finished for best in found)
        for source, best in zip(sources, found, strict=True):
            one = best[0]
            assert {PAD, BOS, EOS}.isdisjoint(one.ids)
            limit = max(len(source.split()) + 1 + 2, min_length + 1)
            assert len(one.ids) + one.finished <= limit
            assert len(one.ids) >= min_length or not one.finished
            assert one.finished or len(one.ids) == limit
    with pytest.raises(ConfigError, match='min_length is 64'):
        make_translator(model, params, min_length=64)


@pytest.mark.slow
def test_sampling_follows_its_settings(model, params):
    sources = random_sources(8, 6, vocab_size=VOCAB)
    greedy = make_translator(model, params, method='greedy').translate(sources)
    assert make_translator(model, params, method='sampling', top_k=1).translate(sources) == greedy
    assert make_translator(model, params, method='sampling', top_p=1e-6).translate(sources) == greedy
    assert make_translator(model, params, method='sampling', temperature=1e-4).translate(sources) == greedy
    translator = make_translator(model, params, method='sampling')
    assert translator.translate(sources) != greedy
    assert translator.translate(sources, rng=jax.random.key(7)) != translator.translate(sources, rng=jax.random.key(8))
    draws = translator.translate_n_best(['w4', 'w4'], 5)
    assert len({one.ids for best in draws for one in best}) > 5
    for one in draws[0]:
        if one.finished:
            assert one.log_probability == pytest.approx(
                translator.score(['w4'], [spell(one.ids)])[0].log_probability, abs=1e-4
            )


def test_sampling_draws_from_the_models_own_distribution():
    model = TableModel(vocab_size=6, num_sentences=1, scale=1.0)
    params = model.init(jax.random.key(3))
    params['table'] = params['table'].at[..., [PAD, BOS]].set(-1e9)
    translator = make_translator(model, params, longest=3, method='sampling')
    draws = [one.ids[:1] for one in translator.translate_n_best(['w4 w5'], 4_000)[0]]
    row = np.exp(np.asarray(params['table'])[0, 0, 0, BOS])
    for token, share in enumerate(row / row.sum()):
        drawn = draws.count(() if token == EOS else (token,)) / len(draws)
        assert drawn == pytest.approx(share, abs=0.03)


def test_the_number_of_programs_stays_bounded(model, params):
    sources = random_sources(90, 8, longest=60, vocab_size=VOCAB)
    translator = make_translator(model, params, beam_size=2, batch_size=16, max_extra_length=8)
    translator.translate(sources)
    once = translator.num_programs
    assert once <= 60
    translator.translate(sources[::-1])
    assert translator.num_programs == once


def test_what_cannot_be_done_is_refused(model, params):
    translator = make_translator(model, params, beam_size=3)
    with pytest.raises(ValueError, match=r'n is 4; beam gives at most config.decoding.beam_size \(3\)'):
        translator.translate_n_best(['w4'], 4)
    with pytest.raises(ValueError, match='2 prefixes for 1 lines'):
        translator.translate(['w4'], prefixes=['w4', 'w5'])
    with pytest.raises(ValueError, match='prefix of line 2 has 71 subwords'):
        translator.translate(['w4', 'w5'], prefixes=['', 'w4 ' * 70])
    with pytest.raises(ValueError, match='n is 2; greedy'):
        make_translator(model, params, method='greedy').translate_n_best(['w4'], 2)
    with pytest.raises(ValueError, match='target of line 1 has 71 subwords'):
        translator.score(['w4'], ['w4 ' * 70])
    with pytest.raises(ConfigError, match='vocabulary has 9 subwords, the model 11'):
        Translator(model, params, WordVocabulary(9), DecodingConfig())
    with pytest.raises(ConfigError, match='alpha is 90'):
        make_translator(model, params, alpha=90.0, length_penalty='power')
    for n, method in ((0, 'beam'), (0, 'greedy'), (-1, 'sampling')):
        with pytest.raises(ValueError, match=f'n is {n}; it must be at least 1'):
            make_translator(model, params, method=method).translate_n_best(['w4'], n)
    broken = dict(params, table=params['table'] * np.nan)
    with pytest.raises(ValueError, match='no finite probabilities for line 1'):
        make_translator(model, broken).translate(['w4'])


@pytest.mark.parametrize(
    ('call', 'name'),
    [
        (lambda translator: translator.translate('w4 w5'), 'texts'),
        (lambda translator: translator.translate_n_best('w4', 2), 'texts'),
        (lambda translator: translator.translate(['w4', 'w5'], prefixes='w4'), 'prefixes'),
        (lambda translator: translator.score('w4', ['w4']), 'sources'),
        (lambda translator: translator.score(['w4'], 'w4'), 'targets'),
    ],
)
def test_a_single_text_is_no_list_of_texts(model, params, call, name):
    with pytest.raises(TypeError, match=f"{name} is the one text 'w4.*must be a list of texts"):
        call(make_translator(model, params))


def test_a_beam_beyond_all_use_is_refused_with_what_it_would_take(model, params):
    make_translator(model, params, beam_size=1000)
    make_translator(model, params, beam_size=1001, method='greedy')
    with pytest.raises(ConfigError, match=r'beam_size is 1,001; it must be at most 1,000\. .*batch_size 8 sentences'):
        make_translator(model, params, beam_size=1001)
    # Its logits are V floats; its cache is the subwords read so far, two more, and three numbers a sentence.
    assert count_bytes(model, 7) == 7 * 4 * (VOCAB + model.max_length + 2 + 3)
