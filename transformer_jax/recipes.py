"""Named sets of config changes: `SIZES` of the model; `RECIPES` that set each fidelity choice as a known system does;
`LEVELS` of the built-in task.

All are expanded by a config file's `get_config` (`size=`, `recipe=`, `level=`) and leave no trace but what they set.
"""

from collections.abc import Mapping
from typing import Any

from transformer_jax.config import Config, require_choice
from transformer_jax.overlay import overlay

# base and big: Table 3 of the paper. big's dropout is that of English-German; English-French uses 0.1 (section 6.1).
# billion: seven times big, for slices of many accelerators; not in the paper.
SIZES: dict[str, dict[str, Any]] = {
    'tiny': {
        'model.num_encoder_layers': 2,
        'model.num_decoder_layers': 2,
        'model.d_model': 128,
        'model.d_ff': 512,
        'model.attention.num_heads': 4,
        'model.attention.head_dim': 32,
        'model.dropout_rate': 0.1,
    },
    'mini': {
        'model.num_encoder_layers': 3,
        'model.num_decoder_layers': 3,
        'model.d_model': 256,
        'model.d_ff': 1024,
        'model.attention.num_heads': 4,
        'model.attention.head_dim': 64,
        'model.dropout_rate': 0.1,
    },
    'base': {
        'model.num_encoder_layers': 6,
        'model.num_decoder_layers': 6,
        'model.d_model': 512,
        'model.d_ff': 2048,
        'model.attention.num_heads': 8,
        'model.attention.head_dim': 64,
        'model.dropout_rate': 0.1,
    },
    'big': {
        'model.num_encoder_layers': 6,
        'model.num_decoder_layers': 6,
        'model.d_model': 1024,
        'model.d_ff': 4096,
        'model.attention.num_heads': 16,
        'model.attention.head_dim': 64,
        'model.dropout_rate': 0.3,
    },
    'billion': {
        'model.num_encoder_layers': 12,
        'model.num_decoder_layers': 12,
        'model.d_model': 2048,
        'model.d_ff': 8192,
        'model.attention.num_heads': 16,
        'model.attention.head_dim': 128,
        'model.dropout_rate': 0.1,
    },
}

# Every field in which the systems below differ, as the paper has it (sections 3, 5.3, 5.4 and 6.1).
_PAPER: dict[str, Any] = {
    'model.norm_order': 'post',
    'model.norm_epsilon': 1e-6,
    'model.sinusoid_layout': 'interleaved',
    'model.activation': 'relu',
    'model.attention.use_bias': False,
    'model.attention.dropout_rate': 0.0,
    'model.activation_dropout_rate': 0.0,
    'model.output_bias': False,
    'optimizer.name': 'adam',
    'optimizer.beta1': 0.9,
    'optimizer.beta2': 0.98,
    'optimizer.epsilon': 1e-9,
    'optimizer.clip_norm': None,
    'optimizer.schedule.name': 'warmup',
    'optimizer.schedule.factor': 1.0,
    'optimizer.schedule.peak': 7e-4,
    'optimizer.schedule.warmup_steps': 4000,
    'train.label_smoothing': 0.1,
    'train.smoothing_over': 'all',
    'train.ema_decay': None,
    'decoding.beam_size': 4,
    'decoding.length_penalty': 'gnmt',
    'decoding.alpha': 0.6,
    'decoding.max_extra_length': 50,
}

RECIPES: dict[str, dict[str, Any]] = {
    'paper': _PAPER,
    # tensor2tensor's later defaults (its first version is the paper's): norm before each sublayer, dropout also on
    # attention weights and inside the feed-forward layer, twice the learning rate after twice the warm-up.
    't2t': _PAPER
    | {
        'model.norm_order': 'pre',
        'model.sinusoid_layout': 'tensor2tensor',
        'model.attention.dropout_rate': 0.1,
        'model.activation_dropout_rate': 0.1,
        'optimizer.beta2': 0.997,
        'optimizer.schedule.factor': 2.0,
        'optimizer.schedule.warmup_steps': 8000,
        'train.smoothing_over': 'others',
        'decoding.max_extra_length': 100,
    },
    # fairseq's WMT recipe: a peak rate of 5e-4 with inverse square root decay, biases in attention, L^alpha.
    'fairseq': _PAPER
    | {
        'model.norm_epsilon': 1e-5,
        'model.sinusoid_layout': 'tensor2tensor',
        'model.attention.use_bias': True,
        'optimizer.epsilon': 1e-8,
        'optimizer.schedule.name': 'inverse_sqrt',
        'optimizer.schedule.peak': 5e-4,
        'train.smoothing_over': 'others',
        'decoding.length_penalty': 'power',
    },
    # Marian's base task: a long warm-up to a low rate, parameters averaged at 1e-4 an update, scores divided by length.
    'marian': _PAPER
    | {
        'model.sinusoid_layout': 'concatenated',
        'model.attention.use_bias': True,
        'model.output_bias': True,
        'optimizer.schedule.name': 'inverse_sqrt',
        'optimizer.schedule.peak': 3e-4,
        'optimizer.schedule.warmup_steps': 16_000,
        'train.ema_decay': 0.9999,
        'decoding.beam_size': 8,
        'decoding.length_penalty': 'power',
        'decoding.alpha': 1.0,
    },
    # The Flax translation example: as tensor2tensor in the model, a short warm-up to a high rate.
    # It leaves embeddings unscaled and draws them sqrt(d_model) times wider; ours start at the same values, scaled.
    'flax': _PAPER
    | {
        'model.norm_order': 'pre',
        'model.sinusoid_layout': 'tensor2tensor',
        'model.attention.dropout_rate': 0.1,
        'model.activation_dropout_rate': 0.1,
        'optimizer.schedule.name': 'inverse_sqrt',
        'optimizer.schedule.peak': 2e-3,
        'optimizer.schedule.warmup_steps': 1000,
        'train.smoothing_over': 'others',
    },
}

# The built-in task: its text, and a training of minutes on a CPU that every family of models learns it by.
_BUILT_IN: dict[str, Any] = {
    'data.source': 'grammar',
    'data.grammar.level': 'quickstart',
    'data.batching': 'packing',  # one shape, so one program to compile
    'data.max_length': 32,
    'data.batch_tokens': 2048,
    'vocabulary.size': 1200,
    'model.max_length': 128,
    'optimizer.schedule.name': 'cosine',  # down to 0: the paper's formula would still be high after so few updates
    'optimizer.schedule.peak': 3e-3,
    'optimizer.schedule.warmup_steps': 150,
    'train.steps': 900,
    'evaluation.every_steps': 450,
    'evaluation.max_pairs': 200,
    'evaluation.bleu': False,  # translations come after training
    'evaluation.score': 'loss',
    'checkpoint.every_steps': 450,
}
LEVELS: dict[str, dict[str, Any]] = {
    'quickstart': _BUILT_IN,
    # A larger lexicon, longer sentences and more constructions at once.
    'full': _BUILT_IN
    | {
        'data.grammar.level': 'full',
        'data.grammar.num_train': 200_000,
        'data.max_length': 64,
        'data.batch_tokens': 4096,
        'vocabulary.size': 2000,
        'train.steps': 4000,
        'evaluation.every_steps': 1000,
        'checkpoint.every_steps': 1000,
    },
    # The words of quickstart in sentences of 3 to 24: what length alone does to a model. `evaluate` scores by length.
    'lengths': _BUILT_IN
    | {
        'data.grammar.level': 'lengths',
        'data.max_length': 64,
        'train.steps': 5000,
        'evaluation.every_steps': 1000,
        'checkpoint.every_steps': 1000,
    },
}


def apply(config: Config, *, size: str | None = None, recipe: str | None = None, level: str | None = None) -> Config:
    """The config with a recipe, a size and a level of the built-in task applied, in this order; None changes nothing.

    Raises `ConfigError` for other names.
    """
    for name, word, table in ((recipe, 'recipe', RECIPES), (size, 'size', SIZES), (level, 'level', LEVELS)):
        if name is not None:
            config = overlay(config, _look_up(name, word, table))
    return config


def _look_up(name: str, word: str, table: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    require_choice(word, name, table)
    return table[name]
