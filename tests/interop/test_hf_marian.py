"""Imported MarianMTModel folders against the same forward pass written in numpy float64, and what must be refused."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy

import transformer_jax.__main__ as command_line
from transformer_jax import models
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.store import Store
from transformer_jax.commands import train as train_command
from transformer_jax.config import ConfigError, VocabularyConfig
from transformer_jax.data.batch import Batch
from transformer_jax.data.vocabulary import JointVocabulary, load_vocabulary
from transformer_jax.data.vocabulary_training import train_vocabulary
from transformer_jax.decoding.translator import Translator
from transformer_jax.interop.hf_marian import import_marian, main, make_config, read_settings
from transformer_jax.interop.marian_parameters import convert_parameters, read_tensors
from transformer_jax.overlay import config_from_dict

SETTINGS: dict[str, Any] = {
    'model_type': 'marian', 'architectures': ['MarianMTModel'], 'is_encoder_decoder': True,
    'vocab_size': 53, 'decoder_vocab_size': 53, 'd_model': 12, 'encoder_layers': 2, 'decoder_layers': 3,
    'encoder_attention_heads': 3, 'decoder_attention_heads': 2, 'encoder_ffn_dim': 17, 'decoder_ffn_dim': 17,
    'activation_function': 'swish', 'scale_embedding': True, 'share_encoder_decoder_embeddings': True,
    'tie_word_embeddings': True, 'max_position_embeddings': 23, 'static_position_embeddings': True,
    'normalize_before': False, 'dropout': 0.1, 'attention_dropout': 0.0, 'activation_dropout': 0.0,
    'pad_token_id': 52, 'eos_token_id': 0, 'bos_token_id': 0, 'decoder_start_token_id': 52,
    'forced_eos_token_id': 0, 'bad_words_ids': [[52]], 'num_beams': 6, 'max_length': 512,
}  # fmt: skip

ACTIVATIONS = {
    'relu': lambda x: np.maximum(x, 0),
    'swish': lambda x: x / (1 + np.exp(-x)),
    'silu': lambda x: x / (1 + np.exp(-x)),
    'gelu_new': lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    'gelu': lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
}


def make_tensors(settings: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face's names, each tied table once."""
    rng = np.random.default_rng(seed)
    width, inner, size = settings['d_model'], settings['encoder_ffn_dim'], settings['vocab_size']
    shapes: dict[str, tuple[int, ...]] = {'final_logits_bias': (1, size)}
    if settings['share_encoder_decoder_embeddings']:
        shapes['model.shared.weight'] = (size, width)
    else:
        shapes |= {f'model.{side}.embed_tokens.weight': (size, width) for side in ('encoder', 'decoder')}
    if not settings['tie_word_embeddings']:
        shapes['lm_head.weight'] = (size, width)
    for side, attentions in (('encoder', ['self_attn']), ('decoder', ['self_attn', 'encoder_attn'])):
        for index in range(settings[f'{side}_layers']):
            prefix = f'model.{side}.layers.{index}.'
            dense = {'fc1': (inner, width), 'fc2': (width, inner)}
            dense |= {f'{a}.{p}_proj': (width, width) for a in attentions for p in ('q', 'k', 'v', 'out')}
            for name, shape in dense.items():
                shapes |= {f'{prefix}{name}.weight': shape, f'{prefix}{name}.bias': shape[:1]}
            for name in ['final_layer_norm', *(f'{a}_layer_norm' for a in attentions)]:
                shapes |= {f'{prefix}{name}.weight': (width,), f'{prefix}{name}.bias': (width,)}
    return {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, settings: dict[str, Any], tensors: dict[str, np.ndarray], num_shards: int = 1) -> None:
    """`config.json` and the weights, in as many shards as asked."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(settings))
    if num_shards == 1:
        safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
        return
    shards = {
        f'model-{number:05}-of-{num_shards:05}.safetensors': sorted(tensors)[number::num_shards]
        for number in range(num_shards)
    }
    for name, keys in shards.items():
        safetensors.numpy.save_file({key: tensors[key] for key in keys}, folder / name)
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))


def compute_logits(
    settings: dict[str, Any], tensors: dict[str, np.ndarray], source: list[int], decoder_inputs: list[int]
) -> np.ndarray:
    """Logits `[len(decoder_inputs), V]` of one pair without padding."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    scale = math.sqrt(settings['d_model']) if settings['scale_embedding'] else 1.0
    shared = weights.get('model.shared.weight')
    source_table = weights.get('model.encoder.embed_tokens.weight', shared)
    target_table = weights.get('model.decoder.embed_tokens.weight', shared)
    assert source_table is not None
    assert target_table is not None

    def attend(x: np.ndarray, memory: np.ndarray, name: str, num_heads: int, causal: bool) -> np.ndarray:
        q, k, v = (
            rows @ weights[f'{name}.{part}_proj.weight'].T + weights[f'{name}.{part}_proj.bias']
            for part, rows in (('q', x), ('k', memory), ('v', memory))
        )
        head_dim = x.shape[1] // num_heads
        outputs = []
        for head in range(num_heads):
            own = slice(head * head_dim, (head + 1) * head_dim)
            rows = []
            for t in range(len(x)):
                num_keys = t + 1 if causal else len(memory)
                scores = k[:num_keys, own] @ q[t, own] / math.sqrt(head_dim)
                exponentials = np.exp(scores - scores.max())
                rows.append(exponentials @ v[:num_keys, own] / exponentials.sum())
            outputs.append(np.stack(rows))
        return np.concatenate(outputs, 1) @ weights[f'{name}.out_proj.weight'].T + weights[f'{name}.out_proj.bias']

    def normalise(x: np.ndarray, name: str) -> np.ndarray:
        variance = x.var(axis=1, keepdims=True)
        centred = x - x.mean(axis=1, keepdims=True)
        return centred / np.sqrt(variance + 1e-5) * weights[f'{name}.weight'] + weights[f'{name}.bias']

    def run(side: str, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        num_heads = settings[f'{side}_attention_heads']
        for index in range(settings[f'{side}_layers']):
            name = f'model.{side}.layers.{index}'
            attended = attend(x, x, f'{name}.self_attn', num_heads, memory is not None)
            x = normalise(x + attended, f'{name}.self_attn_layer_norm')
            if memory is not None:
                attended = attend(x, memory, f'{name}.encoder_attn', num_heads, False)
                x = normalise(x + attended, f'{name}.encoder_attn_layer_norm')
            hidden = x @ weights[f'{name}.fc1.weight'].T + weights[f'{name}.fc1.bias']
            hidden = ACTIVATIONS[settings['activation_function']](hidden)
            contracted = hidden @ weights[f'{name}.fc2.weight'].T + weights[f'{name}.fc2.bias']
            x = normalise(x + contracted, f'{name}.final_layer_norm')
        return x

    memory = run('encoder', source_table[source] * scale + place(len(source), settings['d_model']), None)
    x = target_table[decoder_inputs] * scale + place(len(decoder_inputs), settings['d_model'])
    output_table = target_table if settings['tie_word_embeddings'] else weights['lm_head.weight']
    return run('decoder', x, memory) @ output_table.T + weights['final_logits_bias'][0]


def place(length: int, width: int) -> np.ndarray:
    """Marian's positions: all sines, then all cosines."""
    table = np.zeros((length, width))
    for position in range(length):
        for i in range(width // 2):
            angle = position / 10_000 ** (2 * i / width)
            table[position, i], table[position, width // 2 + i] = math.sin(angle), math.cos(angle)
    return table


VARIANTS: dict[str, dict[str, Any]] = {
    'opus': {},
    'relu, one table for all but the output': {'activation_function': 'relu', 'tie_word_embeddings': False},
    'separate tables': {'share_encoder_decoder_embeddings': False, 'tie_word_embeddings': False},
    'separate source table': {'share_encoder_decoder_embeddings': False, 'scale_embedding': False},
    'one head, wide': {'d_model': 14, 'encoder_attention_heads': 1, 'decoder_attention_heads': 7, 'encoder_layers': 1},
    'gelu': {'activation_function': 'gelu', 'encoder_attention_heads': 2},
    'tanh form of gelu': {'activation_function': 'gelu_new', 'decoder_attention_heads': 2},
}  # fmt: skip


def make_batch(sources: list[list[int]], targets: list[list[int]], pad: int) -> Batch:
    """Padded rows, one pair each."""
    sides = []
    for rows in (sources, targets):
        length = max(map(len, rows)) + 1  # a column of padding in every row
        ids = [row + [pad] * (length - len(row)) for row in rows]
        segments = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
        sides.append([jnp.asarray(side, jnp.int32) for side in (ids, segments, [list(range(length))] * len(rows))])
    (inputs, input_segments, input_positions), (outputs, target_segments, target_positions) = sides
    return Batch(inputs, outputs, input_segments, target_segments, input_positions, target_positions)


def imported_logits(folder: Path, sources: list[list[int]], targets: list[list[int]]) -> np.ndarray:
    settings = read_settings(folder)
    config = make_config(settings, {}, {})
    models.validate(config)
    size, start_id = settings['vocab_size'], settings['decoder_start_token_id']
    model = models.build(config.model, vocab_size=size, start_id=start_id)
    params = jax.tree.map(jnp.asarray, convert_parameters(read_tensors(folder), config.model, size))
    batch = make_batch(sources, targets, settings['pad_token_id'])
    return np.asarray(jax.jit(lambda batch: model.project(params, model.hidden(params, batch)))(batch))


@pytest.mark.parametrize('changes', VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_the_equations(tmp_path, changes):
    settings = {**SETTINGS, **changes}
    tensors = make_tensors(settings)
    write_folder(tmp_path, settings, tensors, num_shards=3 if changes else 1)
    rng = np.random.default_rng(7)
    sources = [rng.integers(1, 52, length).tolist() + [0] for length in (10, 4, 1)]
    targets = [rng.integers(1, 52, length).tolist() + [0] for length in (6, 12, 2)]
    ours = imported_logits(tmp_path, sources, targets)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        expected = compute_logits(settings, tensors, source, [52, *target[:-1]])
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(ours[row, : len(target)], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model_type': 'bart'}, "model_type is 'bart'; it must be 'marian'"),
        ({'normalize_before': True}, 'normalize_before is True; it must be False'),
        ({'normalize_embedding': True}, 'normalize_embedding is True'),
        ({'static_position_embeddings': False}, 'static_position_embeddings is False'),
        ({'activation_function': 'mish'}, "activation_function is 'mish'; it must be one of 'relu', 'swish'"),
        ({'decoder_ffn_dim': 19}, 'decoder_ffn_dim is 19; it must be 17'),
        ({'decoder_vocab_size': 59}, 'decoder_vocab_size is 59; it must be 53'),
        ({'encoder_attention_heads': 5}, 'encoder_attention_heads is 5; it must be a divisor of d_model, 12'),
        ({'d_model': 15, 'encoder_attention_heads': 3, 'decoder_attention_heads': 5}, 'd_model is 15; it must be even'),
        ({'decoder_start_token_id': 7}, 'decoder_start_token_id is 7; it must be pad_token_id, 52'),
        ({'encoder_layers': None}, 'lacks encoder_layers'),
    ],
)
def test_settings_we_can_not_follow_are_named(tmp_path, changes, message):
    (tmp_path / 'config.json').write_text(json.dumps({**SETTINGS, **changes}))
    with pytest.raises(ConfigError, match=message):
        read_settings(tmp_path)


def convert(tensors: dict[str, np.ndarray], **changes: Any) -> dict[str, Any]:
    settings = {**SETTINGS, **changes}
    return convert_parameters(tensors, make_config(settings, {}, {}).model, settings['vocab_size'])


def test_weights_that_do_not_suit_the_settings_are_named():
    tensors = make_tensors(SETTINGS)
    name = 'model.decoder.layers.1.encoder_attn.v_proj.bias'
    with pytest.raises(ConfigError, match=f'the weights lack {name}'):
        convert({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ConfigError, match='the weights lack model.shared.weight'):
        convert({key: value for key, value in tensors.items() if key != 'model.shared.weight'})
    with pytest.raises(ConfigError, match='does not account for: model.encoder.layer_norm.weight'):
        convert(tensors | {'model.encoder.layer_norm.weight': np.ones(12, np.float32)})
    with pytest.raises(ConfigError, match=r'encoder_attn.v_proj.bias has the shapes \(12,\), \(11,\), \(12,\)'):
        convert(tensors | {name: np.ones(11, np.float32)})


def test_any_name_of_tied_tables_will_do_if_they_agree():
    tensors = make_tensors(SETTINGS)
    table = tensors.pop('model.shared.weight')
    assert convert(tensors | {'lm_head.weight': table})['target_embedding']['table'] is table
    copies = {f'model.{name}.weight': table.copy() for name in ('shared', 'encoder.embed_tokens')}
    np.testing.assert_array_equal(convert(tensors | copies)['target_embedding']['table'], table)
    with pytest.raises(ConfigError, match='ties model.shared.weight and lm_head.weight, but the weights differ'):
        convert(tensors | {'model.shared.weight': table, 'lm_head.weight': table + 1})


def test_a_missing_logits_bias_is_zero():
    tensors = make_tensors(SETTINGS)
    del tensors['final_logits_bias']
    np.testing.assert_array_equal(convert(tensors)['output_bias'], np.zeros(53))


def test_stored_positions_must_be_the_sinusoids():
    tensors = make_tensors(SETTINGS)
    name = 'model.encoder.embed_positions.weight'
    convert(tensors | {name: place(23, 12).astype(np.float16).astype(np.float32)})
    interleaved = place(23, 12).reshape(23, 2, 6).swapaxes(1, 2).reshape(23, 12)
    with pytest.raises(ConfigError, match=name):
        convert(tensors | {name: interleaved.astype(np.float32)})


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_half_precision_weights_become_float32(tmp_path, dtype):
    stored = {name: jnp.asarray(tensor, dtype) for name, tensor in make_tensors(SETTINGS).items()}
    safetensors.flax.save_file(stored, tmp_path / 'model.safetensors')
    for name, tensor in read_tensors(tmp_path).items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, np.asarray(stored[name].astype(jnp.float32)))


def test_weights_in_other_formats_are_pointed_at(tmp_path):
    (tmp_path / 'pytorch_model.bin').write_bytes(b'old')
    with pytest.raises(ConfigError, match=r'it holds pytorch_model.bin: save it anew'):
        read_tensors(tmp_path)
    (tmp_path / 'model.safetensors').write_bytes(b'12345678 half')
    with pytest.raises(ConfigError, match='damaged or not a safetensors file'):
        read_tensors(tmp_path)


LINES = ['der alte Bär schläft', 'die Katze geht weit', 'nie geht der Bär', 'oft schläft die alte Katze']


@pytest.fixture(scope='module')
def spm() -> bytes:
    config = VocabularyConfig(size=49, byte_fallback=False)
    return train_vocabulary(config, LINES * 3, report=lambda _: None).files()['spm.model']


def write_joint(folder: Path, spm: bytes, **changes: Any) -> dict[str, Any]:
    ids = {'pad_token_id': 0, 'decoder_start_token_id': 0, 'eos_token_id': 1, 'bos_token_id': 3}
    settings = {**SETTINGS, 'vocab_size': 49, 'decoder_vocab_size': 49, **ids, **changes}
    write_folder(folder, settings, make_tensors(settings))
    (folder / 'spm.model').write_bytes(spm)
    return settings


def write_opus(folder: Path, spm: bytes) -> dict[str, Any]:
    """Pieces of the model in another order, pad last."""
    vocabulary = JointVocabulary(spm)
    pieces = ['</s>', '<unk>', *sorted(vocabulary.pieces(range(4, 49))), '<pad>']
    sizes = {'vocab_size': len(pieces), 'decoder_vocab_size': len(pieces)}
    pad = {'pad_token_id': len(pieces) - 1, 'decoder_start_token_id': len(pieces) - 1}
    settings = {**SETTINGS, **sizes, **pad}
    write_folder(folder, settings, make_tensors(settings))
    for side in ('source', 'target'):
        (folder / f'{side}.spm').write_bytes(spm)
    (folder / 'vocab.json').write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / 'tokenizer_config.json').write_text(json.dumps({'source_lang': 'de', 'target_lang': 'fr'}))
    (folder / 'generation_config.json').write_text(json.dumps({'num_beams': 2, 'length_penalty': 0.7}))
    return settings


@pytest.mark.parametrize('write', [write_joint, write_opus])
def test_an_imported_run_loads_and_scores_as_the_equations(tmp_path, spm, write):
    settings = write(tmp_path / 'theirs', spm)
    import_marian(tmp_path / 'theirs', tmp_path / 'run', overrides={'decoding.batch_size': '7'})
    folder = RunFolder.open(tmp_path / 'run')
    config = config_from_dict(folder.read_config())
    vocabulary = load_vocabulary(folder.vocabulary)
    model = models.build(config.model, vocab_size=vocabulary.size, start_id=vocabulary.start_id)
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    with Store(folder, config.checkpoint) as store:
        params, info = store.restore_params(abstract)
    assert info['step'] == 0
    assert config.decoding.batch_size == 7
    assert config.decoding.length_penalty == 'power'
    if write is write_opus:
        assert (config.source_language, config.target_language) == ('de', 'fr')
        assert (config.decoding.beam_size, config.decoding.alpha) == (2, 0.7)
    translator = Translator(model, params, vocabulary, config.decoding)
    [scored] = translator.score([LINES[0]], [LINES[1]])
    source, target = vocabulary.encode_source([LINES[0]])[0], vocabulary.encode_target([LINES[1]])[0]
    eos, start = settings['eos_token_id'], settings['decoder_start_token_id']
    logits = compute_logits(settings, make_tensors(settings), [*source, eos], [start, *target])
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = log_probabilities[np.arange(len(target) + 1), [*target, eos]].sum()
    assert scored.log_probability == pytest.approx(expected, abs=1e-3, rel=1e-5)


def test_what_the_weights_decide_is_not_overridden_and_nothing_is_overwritten(tmp_path, spm):
    folder, run = tmp_path / 'theirs', tmp_path / 'run'
    write_joint(folder, spm)
    for overrides in ({'model.scale_embedding': 'false'}, {'model.encoder_self.num_heads': 2}, {'vocabulary.size': 50}):
        with pytest.raises(ConfigError, match='the imported weights are of a model with'):
            import_marian(folder, run, overrides=overrides)
    with pytest.raises(ConfigError, match=r'no field config.decoding.beam_sice \(did you mean decoding.beam_size'):
        import_marian(folder, run, overrides={'decoding.beam_sice': '3'})
    assert not run.exists()
    run.mkdir()
    (run / 'notes.txt').write_text('mine')
    with pytest.raises(ConfigError, match='exists already and is not overwritten'):
        import_marian(folder, run)
    assert [path.name for path in run.iterdir()] == ['notes.txt']


def test_a_vocabulary_of_another_model_is_refused(tmp_path, spm):
    write_joint(tmp_path / 'size', spm, vocab_size=53, decoder_vocab_size=53)
    with pytest.raises(ConfigError, match='vocab_size is 53, but the vocabulary beside it has 49'):
        import_marian(tmp_path / 'size', tmp_path / 'run')
    write_joint(tmp_path / 'eos', spm, eos_token_id=2)
    with pytest.raises(ConfigError, match='eos_token_id is 2, but the vocabulary beside it has 1'):
        import_marian(tmp_path / 'eos', tmp_path / 'run')
    write_joint(tmp_path / 'none', spm)
    (tmp_path / 'none' / 'spm.model').unlink()
    with pytest.raises(ConfigError, match=r'holds neither source.spm, target.spm and vocab.json nor one spm.model'):
        import_marian(tmp_path / 'none', tmp_path / 'run')


def test_the_command_says_what_it_made_or_what_is_wrong(tmp_path, spm, capsys):
    write_joint(tmp_path / 'theirs', spm)
    command = [str(tmp_path / 'theirs'), '--run', str(tmp_path / 'run'), '--config.decoding.beam_size=3']
    assert main(command) == 0
    assert f'is now the run {tmp_path}/run' in capsys.readouterr().out
    assert RunFolder.open(tmp_path / 'run').read_config()['decoding']['beam_size'] == 3
    assert main(command) == 2
    assert 'exists already' in capsys.readouterr().err


def test_an_imported_run_is_scored_on_named_text_alone_and_is_not_trained(tmp_path, spm, capsys, monkeypatch):
    write_joint(tmp_path / 'theirs', spm)
    run = str(tmp_path / 'run')
    assert main([str(tmp_path / 'theirs'), '--run', run]) == 0
    assert command_line.main(['evaluate', '--run', run]) == 2
    assert 'no text to score it on is named; add --config.data.source=text_files' in capsys.readouterr().err
    assert command_line.main(['evaluate', '--run', run, '--config.data.source=text_files']) == 2
    assert 'config.data.text_files names no file' in capsys.readouterr().err
    monkeypatch.setattr(train_command, 'open_corpus', lambda *arguments, **options: pytest.fail('encodes for nothing'))
    assert command_line.main(['train', '--run', run]) == 2
    assert 'parameters alone, without the state of an optimizer' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path, name):
    torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
    settings = {**SETTINGS, **VARIANTS[name]}
    tensors = make_tensors(settings)
    if 'model.shared.weight' in tensors and not settings['tie_word_embeddings']:  # newer versions store it three times
        copies = (f'model.{side}.embed_tokens.weight' for side in ('encoder', 'decoder'))
        tensors |= {copy: tensors['model.shared.weight'].copy() for copy in copies}
    write_folder(tmp_path, settings, tensors)
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path).eval()
    source, target = [5, 17, 31, 2, 0], [11, 3, 47, 0]
    with torch.no_grad():
        expected = (
            theirs(torch.tensor([source]), decoder_input_ids=torch.tensor([[52, *target[:-1]]])).logits[0].numpy()
        )
    ours = imported_logits(tmp_path, [source], [target])[0, : len(target)]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
