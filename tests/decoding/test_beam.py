"""Beam search against a list of all outputs, and what holds of every beam."""

import jax
import numpy as np
import pytest

from tests.decoding.toy_models import (
    BOS,
    EOS,
    PAD,
    TableModel,
    divisor,
    list_outputs,
    make_translator,
    random_sources,
    sentence_of,
)

LONGEST = 5  # subwords with eos


@pytest.fixture(scope='module')
def all_outputs():
    """Toy models of one shape, each of them many tables, with a source for each table and all the outputs of each."""
    model = TableModel(vocab_size=5, num_sentences=50)
    # What is in the source shall not matter, its table does. Longer ones would be cut to the length of an output.
    sources = random_sources(100, 1, longest=LONGEST - 1, vocab_size=5)
    by_sentence = {sentence_of(model, source): source for source in sources}
    toys = []
    for seed in (3, 4, 5):
        params = model.init(jax.random.key(seed))
        # Half of the tables make long outputs likely, so that the best output is not always the first to end.
        params['table'] = params['table'].at[::2, :, :, :, EOS].add(-2.0)
        toys.append((params, {one: list_outputs(model, params, one, LONGEST) for one in by_sentence}))
    assert len(toys) * len(by_sentence) >= 75
    return model, list(by_sentence.values()), toys


@pytest.mark.parametrize(
    ('kind', 'alpha'), [*(('gnmt', alpha) for alpha in (-1.0, 0.0, 0.6, 1.0, 2.0)), ('power', 2.0), ('power', -1.0)]
)
def test_a_beam_as_wide_as_the_space_is_exhaustive_search(all_outputs, kind, alpha):
    model, sources, toys = all_outputs
    translator = make_translator(
        # as many as there are candidates at the last step
        model,
        toys[0][0],
        longest=LONGEST,
        beam_size=3 * 2**4,
        alpha=alpha,
        length_penalty=kind,
        max_extra_length=50,
        batch_size=len(sources),
    )
    lengths = set()
    for params, outputs in toys:
        translator.params = params  # the program is compiled once
        for best, listed in zip(translator.translate_n_best(sources, 3), outputs.values(), strict=True):
            ended = [output for output in listed if output[3]]
            expected = sorted(ended, key=lambda output: -output[1] / divisor(kind, alpha, output[2]))[:3]
            assert [one.ids for one in best] == [tokens for tokens, *_ in expected]
            assert all(one.finished for one in best)
            for one, (_, log_probability, length, _) in zip(best, expected, strict=True):
                assert one.length == length
                assert one.log_probability == pytest.approx(log_probability, abs=1e-5)
                assert one.score == pytest.approx(log_probability / divisor(kind, alpha, length), abs=1e-5)
            lengths.add(best[0].length)
    assert len(lengths) > 1


def test_a_longer_output_wins_when_the_penalty_says_so_and_search_does_not_stop_before_it():
    model = TableModel(vocab_size=6, num_positions=64, num_sentences=1)
    table = np.full((1, 64, 6, 6, 6), -30.0, np.float32)
    table[0, 0, :, BOS, EOS] = np.log(0.6)  # the empty output, -0.5
    table[0, 0, :, BOS, 4] = np.log(0.4)  # or 20 times w4 after it, then eos: -0.9 in all
    table[0, 1:20, :, 4, 4] = 0.0
    table[0, 20:, :, 4, EOS] = 0.0
    params = {'table': jax.numpy.asarray(table)}
    for alpha, length in ((0.0, 1), (0.6, 21), (2.0, 21), (-1.0, 1)):
        for beam_size in (2, 4):
            translator = make_translator(model, params, alpha=alpha, beam_size=beam_size, max_extra_length=40)
            assert [one[0].length for one in translator.translate_n_best(['w5 w5'], 1)] == [length], alpha


@pytest.mark.parametrize('settings', [{}, {'alpha': -0.7}, {'min_length': 4}, {'stop': 'heuristic'}])
def test_a_beam_of_one_is_greedy_decoding(settings):
    model = TableModel(vocab_size=11, num_sentences=31)
    params = model.init(jax.random.key(5))
    sources = random_sources(40, 2, vocab_size=11)
    greedy = make_translator(model, params, method='greedy', **settings).translate_n_best(sources, 1)
    beam = make_translator(model, params, method='beam', beam_size=1, **settings).translate_n_best(sources, 1)
    assert greedy == beam


def test_the_best_translation_is_the_same_however_many_are_asked_for():
    model = TableModel(vocab_size=11, num_sentences=31)
    params = model.init(jax.random.key(6))
    sources = random_sources(40, 3, vocab_size=11)
    translator = make_translator(model, params, beam_size=5)
    all_five = translator.translate_n_best(sources, 5)
    assert [best[:1] for best in all_five] == translator.translate_n_best(sources, 1)
    for best in all_five:
        assert len(best) == len({one.ids for one in best}) == 5
        assert [one.score for one in best if one.finished] == sorted(
            (one.score for one in best if one.finished), reverse=True
        )


@pytest.mark.parametrize('settings', [{}, {'length_penalty': 'power', 'alpha': 1.3}, {'stop': 'heuristic'}])
def test_every_score_is_the_rescored_log_probability_over_the_documented_penalty(settings):
    model = TableModel(vocab_size=11, num_sentences=31)
    params = model.init(jax.random.key(7))
    sources = random_sources(20, 4, vocab_size=11)
    translator = make_translator(model, params, beam_size=4, max_extra_length=50, **settings)
    kind, alpha = settings.get('length_penalty', 'gnmt'), settings.get('alpha', 0.6)
    for source, best in zip(sources, translator.translate_n_best(sources, 4), strict=True):
        rescored = translator.score([source] * 4, [' '.join(f'w{token}' for token in one.ids) for one in best])
        for one, again in zip(best, rescored, strict=True):
            assert one.length == len(one.ids) + 1  # finished
            assert one.score == pytest.approx(one.log_probability / divisor(kind, alpha, one.length), abs=1e-6)
            assert again.log_probability == pytest.approx(one.log_probability, abs=1e-4)
            assert again.score == pytest.approx(one.score, abs=1e-4)


@pytest.mark.parametrize(('kind', 'alpha'), [('gnmt', 0.6), ('power', -1.0)])
def test_every_score_is_a_sum_of_log_probabilities_over_the_documented_penalty(kind, alpha):
    """From the tables themselves, in float64: finished and unfinished ones, with a forced prefix and without."""
    model = TableModel(vocab_size=11, num_sentences=31)
    params = model.init(jax.random.key(10))
    table = np.asarray(params['table'], np.float64)
    log_p = table - np.log(np.exp(table).sum(-1, keepdims=True))
    sources = random_sources(20, 4, vocab_size=11)
    translator = make_translator(model, params, beam_size=4, alpha=alpha, length_penalty=kind, max_extra_length=1)
    prefixes = [((), (4, 9), (7, 4, 2, 6, 5))[line % 3] for line in range(len(sources))]
    texts = [' '.join(f'w{token}' for token in forced) for forced in prefixes]
    found = translator.translate_n_best(sources, 4, prefixes=texts)
    for source, forced, best in zip(sources, prefixes, found, strict=True):
        for one in best:
            past = (0, BOS, *one.ids, *((EOS,) if one.finished else ()))
            places = range(len(forced), len(past) - 2)
            sentence = sentence_of(model, source)
            total = sum(log_p[sentence, t % model.num_positions, past[t], past[t + 1], past[t + 2]] for t in places)
            assert one.ids[: len(forced)] == forced
            assert one.length == len(places)
            assert one.log_probability == pytest.approx(total, abs=1e-4)
            assert one.score == pytest.approx(one.log_probability / divisor(kind, alpha, one.length), rel=1e-6)
    assert len({one.finished for best in found for one in best}) == 2


def test_a_model_that_never_ends_gives_different_unfinished_outputs():
    model = TableModel(vocab_size=11, num_sentences=5)
    params = model.init(jax.random.key(8))
    params['table'] = params['table'].at[..., EOS].set(-1e9)
    translator = make_translator(model, params, beam_size=4, max_extra_length=3)
    for source, best in zip(sources := ['w4', 'w5 w5 w6'], translator.translate_n_best(sources, 4), strict=True):
        assert len({one.ids for one in best}) == 4
        assert not any(one.finished for one in best)
        assert {len(one.ids) for one in best} == {one.length for one in best} == {len(source.split()) + 1 + 3}
        assert all(one.text for one in best)
    assert translator.counts.unfinished == 2


def test_a_beam_wider_than_the_vocabulary_works():
    model = TableModel(vocab_size=6, num_sentences=5)
    params = model.init(jax.random.key(9))
    best = make_translator(model, params, beam_size=10).translate_n_best(['w4 w5', 'w2'], 10)
    for one in best:
        assert len({translation.ids for translation in one}) == 10
        assert all({PAD, EOS, BOS}.isdisjoint(translation.ids) for translation in one)


def test_equal_candidates_are_taken_by_lower_id():
    model = TableModel(vocab_size=9, num_sentences=1)
    params = {'table': jax.numpy.zeros((1, 7, 9, 9, 9))}
    translator = make_translator(model, params, beam_size=3, min_length=2, alpha=0.0)
    best = translator.translate_n_best(['w4'], 3)[0]
    assert [one.ids for one in best] == [(2, 2), (2, 2, 2), (2, 2, 2, 2)]
