"""Hugging Face `MarianMTModel` folders (OPUS-MT and the like) as runs that `translate` and `evaluate` take.

    python -m transformer_jax.interop.hf_marian FOLDER --run DIR [--config.PATH=VALUE ...]

FOLDER holds `config.json`, `model.safetensors` (or its shards with their index) and the vocabulary: `source.spm`,
`target.spm` and `vocab.json` as OPUS-MT has them, or one joint `spm.model` whose own ids are the model's. DIR becomes a
run folder with the config, the vocabulary and a checkpoint of step 0 that holds the parameters alone. Neither PyTorch
nor transformers is needed. To score it on files, name them: `--config.data.source=text_files
--config.data.text_files.test_source=FILE --config.data.text_files.test_target=FILE`, here or to `evaluate`.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from transformer_jax import models
from transformer_jax.checkpoints.run_folder import RunFolder, versions
from transformer_jax.checkpoints.store import Store
from transformer_jax.config import (
    AttentionConfig,
    AttentionOverlayConfig,
    Config,
    ConfigError,
    DecodingConfig,
    ModelConfig,
    walk,
)
from transformer_jax.data.vocabulary import JointVocabulary, MarianVocabulary, Vocabulary
from transformer_jax.interop.marian_parameters import convert_parameters, read_tensors
from transformer_jax.models.interface import abstract_params
from transformer_jax.overlay import config_to_dict, fixed_differences, overlay, parse_overrides
from transformer_jax.parameters import shapes_by_name
from transformer_jax.shapes import Params

# Hugging Face's names of activations -> ours.
_ACTIVATIONS = {
    'relu': 'relu',
    'swish': 'swish',
    'silu': 'swish',
    'gelu': 'gelu',
    'gelu_new': 'gelu_tanh',
    'gelu_pytorch_tanh': 'gelu_tanh',
}

# Fields of old folders that switch what no MarianMTModel computes; each must have this value where it stands at all.
_FIXED_FIELDS = {
    'model_type': 'marian',
    'is_encoder_decoder': True,
    'normalize_before': False,
    'normalize_embedding': False,
    'add_final_layer_norm': False,
    'static_position_embeddings': True,
}
_REQUIRED_FIELDS = (
    'd_model', 'encoder_layers', 'decoder_layers', 'encoder_attention_heads', 'decoder_attention_heads',
    'encoder_ffn_dim', 'decoder_ffn_dim', 'vocab_size', 'activation_function', 'max_position_embeddings',
    'pad_token_id', 'eos_token_id', 'decoder_start_token_id',
)  # fmt: skip


def import_marian(
    folder: epath.PathLike, run_dir: epath.PathLike, *, overrides: Mapping[str, Any] | None = None
) -> RunFolder:
    """Makes a run of a MarianMTModel folder, and returns it closed.

    `overrides` are changes of the config by dotted name; those that would make another model of the weights are
    refused. Raises `ConfigError` before anything is written for a folder that we can't follow, and for a `run_dir` that
    holds something already.
    """
    target = epath.Path(run_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f'{target} exists already and is not overwritten; give a new or an empty folder')
    settings = read_settings(folder)
    made = make_config(settings, *(_read_json(folder, name) for name in ('generation_config', 'tokenizer_config')))
    config = overlay(made, overrides or {})
    _check_same_model(made, config)
    models.validate(config)
    vocabulary = read_vocabulary(folder, settings)
    params = convert_parameters(read_tensors(folder), config.model, vocabulary.size)
    _check_shapes(params, config, vocabulary)
    with RunFolder.start(target, config_to_dict(config), fixed_differences) as run:
        run.check_vocabulary(vocabulary.fingerprint)
        vocabulary.save(run.vocabulary)
        run.update_record(imported={'from': str(folder), 'format': 'MarianMTModel'}, versions=versions())
        with Store(run, config.checkpoint) as store:
            store.save(0, {'params': jax.tree.map(jnp.asarray, params)}, {'imported': str(folder)})
    return run


def _check_same_model(made: Config, changed: Config) -> None:
    """Refuses overrides of what the weights decide; rates, lengths and the execution are the user's."""
    free = ('dropout_rate', '.impl', '.compute_dtype', 'model.max_length')
    before = {path: value for path, _, value in walk(made)}
    for path, _, value in walk(changed):
        weights_decide = path == 'vocabulary.size' or (path.startswith('model.') and not path.endswith(free))
        if weights_decide and value != before[path]:
            raise ConfigError(f'config.{path} is {value!r}; the imported weights are of a model with {before[path]!r}')


def _check_shapes(params: Params, config: Config, vocabulary: Vocabulary) -> None:
    model = models.build(config.model, vocab_size=vocabulary.size, start_id=vocabulary.start_id)
    wanted, found = shapes_by_name(abstract_params(model)), shapes_by_name(params)
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise ConfigError(
                f'parameter {name} has shape {found.get(name)} in the weights, but config.json asks for '
                f'{wanted.get(name)}'
            )


def _read_json(folder: epath.PathLike, name: str) -> dict[str, Any]:
    """A side file of the folder; empty where there is none."""
    path = epath.Path(folder) / f'{name}.json'
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f'{path} is not JSON: {error}') from error


def read_settings(folder: epath.PathLike) -> dict[str, Any]:
    """The folder's `config.json`, checked: raises `ConfigError` naming the first field that we can't follow."""
    path = epath.Path(folder) / 'config.json'
    if not path.exists():
        raise ConfigError(
            f'{path} does not exist; give the folder of a MarianMTModel, with config.json and its weights'
        )
    settings = _read_json(folder, 'config')
    if missing := [name for name in _REQUIRED_FIELDS if settings.get(name) is None]:
        raise ConfigError(f'{path} lacks {", ".join(missing)}')

    heads = ('encoder_attention_heads', 'decoder_attention_heads')
    width, inner, size = settings['d_model'], settings['encoder_ffn_dim'], settings['vocab_size']
    pad = settings['pad_token_id']
    rules = [
        *((name, settings.get(name, value) == value, f'{value!r}') for name, value in _FIXED_FIELDS.items()),
        ('activation_function', settings['activation_function'] in _ACTIVATIONS, f'one of {_quote(_ACTIVATIONS)}'),
        ('decoder_ffn_dim', settings['decoder_ffn_dim'] == inner, f'{inner}, as encoder_ffn_dim'),
        ('decoder_vocab_size', (settings.get('decoder_vocab_size') or size) == size, f'{size}, as vocab_size'),
        ('d_model', width % 2 == 0, 'even, for its sinusoidal positions'),
        *((name, width % settings[name] == 0, f'a divisor of d_model, {width}') for name in heads),
        (
            'decoder_start_token_id',
            settings['decoder_start_token_id'] in (pad, settings.get('bos_token_id')),
            f'pad_token_id, {pad}, or bos_token_id, {settings.get("bos_token_id")}',
        ),
    ]
    for name, holds, rule in rules:
        if not holds:
            raise ConfigError(f'{path}: {name} is {settings[name]!r}; it must be {rule}')
    return settings


def _quote(names: Iterable[str]) -> str:
    return ', '.join(map(repr, names))


def make_config(settings: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Config:
    """Our config for a model of these settings, before a user's overrides.

    `generation` and `tokenizer` are the folder's `generation_config.json` and `tokenizer_config.json`, or empty. The
    beam is theirs, scored as Hugging Face does: log-probability over L^length_penalty.
    """
    num_heads, decoder_heads = settings['encoder_attention_heads'], settings['decoder_attention_heads']
    decoder = AttentionOverlayConfig()
    if decoder_heads != num_heads:
        decoder = AttentionOverlayConfig(num_heads=decoder_heads, head_dim=settings['d_model'] // decoder_heads)
    shared, tied = settings.get('share_encoder_decoder_embeddings', True), settings.get('tie_word_embeddings', True)
    model = ModelConfig(
        d_model=settings['d_model'],
        d_ff=settings['encoder_ffn_dim'],
        num_encoder_layers=settings['encoder_layers'],
        num_decoder_layers=settings['decoder_layers'],
        max_length=settings['max_position_embeddings'],
        attention=AttentionConfig(
            num_heads=num_heads,
            head_dim=settings['d_model'] // num_heads,
            dropout_rate=float(settings.get('attention_dropout', 0.0)),
            use_bias=True,
        ),
        decoder_self=decoder,
        cross=decoder,
        sinusoid_layout='concatenated',
        activation=_ACTIVATIONS[settings['activation_function']],
        norm_epsilon=1e-5,
        tie_embeddings='none' if not tied else 'all' if shared else 'output',
        scale_embedding=bool(settings.get('scale_embedding', False)),
        output_bias=True,
        dropout_rate=float(settings.get('dropout', 0.1)),
        activation_dropout_rate=float(settings.get('activation_dropout', 0.0)),
    )
    config = Config()
    return dataclasses.replace(
        config,
        source_language=tokenizer.get('source_lang') or config.source_language,
        target_language=tokenizer.get('target_lang') or config.target_language,
        data=dataclasses.replace(config.data, max_length=min(config.data.max_length, model.max_length)),
        vocabulary=dataclasses.replace(config.vocabulary, size=settings['vocab_size']),
        model=model,
        decoding=_decoding({**settings, **generation}),
    )


def _decoding(generation: Mapping[str, Any]) -> DecodingConfig:
    beam_size = generation.get('num_beams') or 4
    alpha = generation.get('length_penalty')
    return DecodingConfig(
        method='beam' if beam_size > 1 else 'greedy',
        beam_size=beam_size,
        alpha=1.0 if alpha is None else float(alpha),
        length_penalty='power',
    )


def read_vocabulary(folder: epath.PathLike, settings: Mapping[str, Any]) -> Vocabulary:
    """The folder's vocabulary; raises `ConfigError` when it and `config.json` disagree on the size or on an id."""
    folder = epath.Path(folder)
    if (folder / 'target_vocab.json').exists():
        raise ConfigError(f'{folder}/target_vocab.json: a vocabulary of its own for each side is not supported')
    layouts = (('source.spm', 'target.spm', 'vocab.json'), ('spm.model',))
    layout = next((names for names in layouts if all((folder / name).exists() for name in names)), None)
    if layout is None:
        raise ConfigError(f'{folder} holds neither source.spm, target.spm and vocab.json nor one spm.model')
    contents = [(folder / name).read_bytes() for name in layout]
    try:
        if len(contents) == 3:
            vocabulary = MarianVocabulary(contents[0], contents[1], json.loads(contents[2]), name='vocab.json')
        else:
            vocabulary = JointVocabulary(contents[0], start_id=settings['decoder_start_token_id'], name='spm.model')
    except ValueError as error:
        raise ConfigError(f'the vocabulary in {folder} can not be used: {error}') from error
    for ours, theirs in (
        ('size', 'vocab_size'),
        ('pad_id', 'pad_token_id'),
        ('eos_id', 'eos_token_id'),
        ('start_id', 'decoder_start_token_id'),
    ):
        if getattr(vocabulary, ours) != settings[theirs]:
            raise ConfigError(
                f'{folder}/config.json: {theirs} is {settings[theirs]}, but the vocabulary beside it has '
                f'{getattr(vocabulary, ours)}'
            )
    return vocabulary


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module's docstring. Returns its exit code: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog='python -m transformer_jax.interop.hf_marian',
        description='Makes a run folder of a Hugging Face MarianMTModel folder.',
        epilog='Further arguments change the config: --config.decoding.beam_size=6',
    )
    parser.add_argument('folder', help='holds config.json, model.safetensors and the vocabulary')
    parser.add_argument('--run', required=True, metavar='DIR', help='the new run folder')
    options, rest = parser.parse_known_args(arguments)
    try:
        run = import_marian(options.folder, options.run, overrides=parse_overrides(rest))
    except ConfigError as error:
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return 2
    print(f'{options.folder} is now the run {run.path}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
