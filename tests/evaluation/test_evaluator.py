"""The evaluator against a loop over single pairs, for awkward numbers of pairs, batches and devices."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import models
from transformer_jax.config import (
    AttentionConfig,
    DecodingConfig,
    EncoderOnlyConfig,
    ExecutionConfig,
    MeshConfig,
    ModelConfig,
    VocabularyConfig,
)
from transformer_jax.data.batch import Batch, Pair
from transformer_jax.data.prepared import prepare
from transformer_jax.data.vocabulary_training import train_vocabulary
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation import evaluator as evaluator_module
from transformer_jax.evaluation.bleu import SPLIT_BLEU, chrf_score, sacrebleu_score, scores_by_length
from transformer_jax.evaluation.comparison import divergence
from transformer_jax.evaluation.evaluator import Evaluator, Result
from transformer_jax.parallel.mesh import make_mesh

WORDS = ['alt', 'Bär', 'U-Bahn', 'die', 'geht', 'nie', 'oft', 'weit', '„ja“', 'z. B.']
CONFIG = ModelConfig(
    d_model=14,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=31,
    attention=AttentionConfig(num_heads=3, head_dim=5),
)


class ListedPairs:
    """A source of one split, held in memory."""

    def __init__(self, pairs):
        self.pairs = pairs

    def splits(self):
        return ('test',)

    def size(self, split):
        return len(self.pairs)

    def read(self, split):
        return iter(self.pairs)

    def fingerprint(self, split):
        return repr(self.pairs)

    def contents(self, split):
        return {'pairs': self.fingerprint(split)}


def make_pairs(number: int) -> list[Pair]:
    rng = np.random.default_rng(number)
    lines = [' '.join(rng.choice(WORDS, rng.integers(1, 4))) for _ in range(2 * number)]
    tags = [('short',), ('short', 'odd'), ()]
    return [Pair(i, lines[2 * i], lines[2 * i + 1], {'phenomena': tags[i % 3]}) for i in range(number)]


@pytest.fixture(scope='module')
def vocabulary():
    texts = [pair.source for pair in make_pairs(200)]
    config = VocabularyConfig(size=61, byte_fallback=False)
    return train_vocabulary(config, texts, report=lambda _: None)


@pytest.fixture(scope='module')
def model(vocabulary):
    execution = ExecutionConfig(unroll=1)
    return models.build(CONFIG, vocab_size=vocabulary.size, start_id=vocabulary.start_id, execution=execution)


@pytest.fixture(scope='module')
def params(model):
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.4, leaf.shape), leaf.dtype), shapes)


def prepare_pairs(pairs, vocabulary, folder):
    return prepare(ListedPairs(pairs), 'test', vocabulary, folder, progress=False, report=lambda _: None)


def score_one_by_one(model, params, vocabulary, pairs, length) -> np.ndarray:
    """Each pair as a batch of its own, padded to `length`; the softmax in float64."""
    logits_of = jax.jit(lambda batch: model.project(params, model.hidden(params, batch))[0])

    def log_likelihood(pair):
        inputs = [*vocabulary.encode_source([pair.source])[0], vocabulary.eos_id]
        targets = [*vocabulary.encode_target([pair.target])[0], vocabulary.eos_id]
        sides = [np.array([[*ids, *[0] * (length - len(ids))]], np.int32) for ids in (inputs, targets)]
        segments = [(np.arange(length) < len(ids))[None].astype(np.int32) for ids in (inputs, targets)]
        positions = [np.arange(length, dtype=np.int32)[None]] * 2
        logits = np.asarray(logits_of(Batch(*map(jnp.asarray, (*sides, *segments, *positions)))), np.float64)
        return sum(logits[t, token] - np.log(np.exp(logits[t]).sum()) for t, token in enumerate(targets))

    return -np.array([log_likelihood(pair) for pair in pairs])


@pytest.fixture(scope='module')
def pairs():
    return make_pairs(41)


@pytest.fixture(scope='module')
def expected(model, params, vocabulary, pairs):
    return score_one_by_one(model, params, vocabulary, pairs, CONFIG.max_length)


def test_what_is_masked_of_a_pair_hangs_on_the_pair_alone(vocabulary, pairs, tmp_path):
    own = EncoderOnlyConfig(selected_rate=0.5)
    config = dataclasses.replace(CONFIG, family='encoder_only', encoder_only=own)
    model = models.build(config, vocab_size=vocabulary.size, start_id=vocabulary.start_id)
    prepared = prepare_pairs(pairs, vocabulary, tmp_path)
    asked = []
    for number, batch_tokens in ((41, 200), (7, 64)):
        evaluator = Evaluator(model, prepared, pairs[:number], vocabulary, batch_tokens=batch_tokens)
        texts = {}
        for task in evaluator.batches():
            for row, pair in enumerate(task.pair_ids):
                length = int(task.batch.input_segment_ids[row].sum())
                texts[pair] = task.batch.inputs[row, :length].tolist(), task.batch.target_segment_ids[row].sum()
        asked.append(texts)
    assert len(asked[0]) == 41
    assert asked[1] == {pair: asked[0][pair] for pair in range(7)}
    assert sum(count for _, count in asked[0].values()) > 41
    with_mask = [pair for pair, (text, _) in asked[0].items() if vocabulary.size in text]
    assert 10 < len(with_mask) < 41


def test_accuracy_counts_the_most_probable_subwords(vocabulary, pairs, tmp_path):
    config = dataclasses.replace(CONFIG, tie_embeddings='none')  # tied, random parameters repeat what they have read
    model = models.build(config, vocab_size=vocabulary.size, start_id=vocabulary.start_id)
    params = model.init(jax.random.key(1))
    prepared = prepare_pairs(pairs, vocabulary, tmp_path)
    evaluator = Evaluator(model, prepared, pairs, vocabulary, batch_tokens=400)
    correct = 0
    for task in evaluator.batches():
        logits = np.asarray(jax.jit(lambda batch: model.project(params, model.hidden(params, batch)))(task.batch))
        right = logits.argmax(axis=-1) == task.batch.targets
        correct += int((right & (task.batch.target_segment_ids > 0)).sum())
    result = evaluator(params)
    assert result.num_correct == correct > 0
    assert result.to_dict()['accuracy'] == correct / result.num_tokens


@pytest.mark.parametrize(('number', 'batch_tokens', 'num_devices'), [(1, 64, None), (7, 64, 4), (41, 200, 8)])
def test_each_pair_scores_as_it_does_alone(
    model, params, vocabulary, pairs, expected, tmp_path, number, batch_tokens, num_devices
):
    prepared = prepare_pairs(pairs, vocabulary, tmp_path)
    mesh = None if num_devices is None else make_mesh(MeshConfig(), jax.devices()[:num_devices])
    evaluator = Evaluator(model, prepared, pairs[:number], vocabulary, batch_tokens=batch_tokens, mesh=mesh)
    nll = evaluator.negative_log_likelihoods(params)
    assert nll.dtype == np.float64
    np.testing.assert_allclose(nll, expected[:number], rtol=1e-5)
    result = evaluator(params)
    num_tokens = sum(len(ids) + 1 for ids in vocabulary.encode_target([pair.target for pair in pairs[:number]]))
    num_words = sum(len(pair.target.split()) for pair in pairs[:number])
    assert (result.num_pairs, result.num_tokens, result.num_words) == (number, num_tokens, num_words)
    assert result.loss == pytest.approx(expected[:number].sum() / num_tokens, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(expected[:number].sum() / num_tokens), rel=1e-4)
    assert result.word_perplexity == pytest.approx(math.exp(expected[:number].sum() / num_words), rel=1e-4)
    assert result.bleu is None
    assert result.match is None


@pytest.fixture(scope='module')
def evaluator(model, vocabulary, pairs, tmp_path_factory):
    prepared = prepare_pairs(pairs, vocabulary, tmp_path_factory.mktemp('ids'))
    return Evaluator(model, prepared, pairs, vocabulary, batch_tokens=2000)


def test_programs_are_compiled_once_and_follow_the_parameters(evaluator, params, expected):
    first = evaluator(params)
    assert first.nll == pytest.approx(expected.sum(), rel=1e-6)
    compiled = evaluator._score_tokens._cache_size()
    assert evaluator(params) == first
    assert evaluator(jax.tree.map(lambda leaf: 2 * leaf, params)).nll != first.nll
    assert evaluator._score_tokens._cache_size() == compiled


def test_a_pair_scored_twice_or_never_is_an_error(evaluator, params, monkeypatch):
    batches = list(evaluator.batches())
    for wrong, times in (([*batches, batches[1]], 2), (batches[1:], 0)):
        monkeypatch.setattr(evaluator_module, 'evaluation_batches', lambda *_, wrong=wrong, **__: iter(wrong))
        with pytest.raises(RuntimeError, match=f'was scored {times} times'):
            evaluator.negative_log_likelihoods(params)


def test_references_longer_than_the_model_are_scored_whole(model, params, vocabulary, tmp_path):
    pairs = [Pair(0, 'die U-Bahn', 'die U-Bahn geht oft weit'), Pair(1, 'die', ' '.join(WORDS * 3))]
    prepared = prepare_pairs(pairs, vocabulary, tmp_path)
    longest = int(prepared.target_lengths.max())
    assert longest > CONFIG.max_length
    roomy = dataclasses.replace(model, config=dataclasses.replace(CONFIG, max_length=longest))
    evaluator = Evaluator(model, prepared, pairs, vocabulary, batch_tokens=64)
    nll = evaluator.negative_log_likelihoods(params)
    assert divergence(evaluator.model, evaluator.model, params, evaluator.batches()) == 0.0  # of a model with room
    np.testing.assert_allclose(nll, score_one_by_one(roomy, params, vocabulary, pairs, longest), rtol=1e-5)


def test_a_pair_longer_than_learned_positions_reach_is_refused(vocabulary, tmp_path):
    pairs = [Pair(0, 'die U-Bahn', 'die U-Bahn geht oft weit'), Pair(1, 'die', ' '.join(WORDS * 3))]
    prepared = prepare_pairs(pairs, vocabulary, tmp_path)
    longest = int(prepared.target_lengths.max())
    for limit in (longest, longest - 1):
        config = dataclasses.replace(CONFIG, positions='learned', max_length=limit)
        model = models.build(config, vocab_size=vocabulary.size, start_id=vocabulary.start_id)
        if limit == longest:
            Evaluator(model, prepared, pairs, vocabulary, batch_tokens=64)
            continue
        with pytest.raises(ValueError, match=rf'has {longest} subwords .*max_length {limit}, .*reach no further'):
            Evaluator(model, prepared, pairs, vocabulary, batch_tokens=64)
        Evaluator(model, prepared, pairs[:1], vocabulary, batch_tokens=64)


def test_translations_are_scored_against_raw_lines_and_saved(model, params, vocabulary, tmp_path):
    pairs = make_pairs(5)
    pairs[1] = pairs[1]._replace(target='  Ｆｕｌｌ　ｗｉｄｔｈ \u2028 ﬁ\ttab 𝔘 \r')
    pairs[2] = pairs[2]._replace(source=' ', target='')
    prepared = prepare_pairs(pairs, vocabulary, tmp_path / 'ids')
    decoding = DecodingConfig(method='greedy', max_extra_length=3)
    translator = Translator(model, params, vocabulary, decoding, report=lambda _: None)
    hypotheses = translator.translate([pair.source for pair in pairs])
    translator.params = jax.tree.map(jnp.zeros_like, params)
    evaluator = Evaluator(
        model, prepared, pairs, vocabulary, batch_tokens=64, translator=translator, target_language='de'
    )
    result = evaluator(params)
    evaluator.write(tmp_path / 'out', result)
    assert evaluator.hypotheses == hypotheses
    references = [pair.target for pair in pairs]
    assert result.scores[:2] == (sacrebleu_score(hypotheses, references), chrf_score(hypotheses, references))
    assert result.scores[2].name == SPLIT_BLEU
    assert result.bleu == result.scores[0].value == result.score('bleu')
    assert result.match is not None
    assert result.match.value == 20  # the blank line
    assert result.match.num_lines_by_phenomenon == {'odd': 2, 'short': 4}
    assert result.by_length == scores_by_length(hypotheses, references, [pair.source for pair in pairs], 'de')
    assert f'% exact match of {result.by_length[0].num_lines}' in result.format()
    for name, lines in (('hypotheses', hypotheses), ('references', references)):
        assert (tmp_path / 'out' / f'test.{name}.txt').read_bytes().decode() == ''.join(f'{line}\n' for line in lines)
    assert json.loads((tmp_path / 'out' / 'test.json').read_text()) == json.loads(json.dumps(result.to_dict()))


def test_a_reference_that_would_be_two_lines_is_refused(model, vocabulary, tmp_path):
    pairs = [Pair(0, 'die U-Bahn', 'die\nU-Bahn')]
    prepared = prepare_pairs(pairs, vocabulary, tmp_path)
    with pytest.raises(ValueError, match='line 1 holds a line feed'):
        Evaluator(model, prepared, pairs, vocabulary, batch_tokens=64)


def test_pairs_of_another_split_are_refused(model, vocabulary, pairs, tmp_path):
    prepared = prepare_pairs(pairs[:3], vocabulary, tmp_path)
    for wrong in (pairs[:4], pairs[1:3]):
        with pytest.raises(ValueError, match='3 prepared in the test split'):
            Evaluator(model, prepared, wrong, vocabulary, batch_tokens=64)
    with pytest.raises(ValueError, match='no pairs'):
        Evaluator(model, prepared, [], vocabulary, batch_tokens=64)


def test_a_result_reads_well():
    result = Result('test', 1200, 14233, 10003, nll=14233 * math.log(2), num_correct=1000)
    assert result.format().splitlines() == [
        'test: 1,200 pairs, 14,233 target subwords, 10,003 words',
        'NLL: 0.6931 nats a subword',
        'perplexity: 2.00 a subword, 2.68 a word',
        'accuracy: 7.0 % of these subwords',
    ]
    assert result.score('loss') == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="no score 'bleu' of the test split; it must be 'loss'"):
        result.score('bleu')
    hopeless = Result('test', 1, 2, 0, nll=4000.0)
    assert hopeless.perplexity == math.inf
    assert hopeless.word_perplexity is None
