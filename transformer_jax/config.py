"""The configuration of a run: frozen dataclasses that hold every default, and the checks that need no other package.

A field is *fixed* unless its metadata says `free`: a resumed run must repeat every fixed field and may change the free
ones (number of steps, mesh, implementation, remat, logging, evaluation, workers). "Off" is `None`, never -1 or 0.
Each package checks its own section against its own table of choices; `commands.validation.check_config` calls them all.
"""

import dataclasses
import difflib
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def option(
    default: Any,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    free: bool = False,
) -> Any:
    """A config field with its rule: `choices`, an inclusive `minimum` and `maximum`, or open `above` and `below`."""
    rule = {'choices': choices, 'minimum': minimum, 'maximum': maximum, 'above': above, 'below': below, 'free': free}
    return dataclasses.field(default=default, metadata=rule)


def _rate(default: float | None = 0.0) -> Any:
    return option(default, minimum=0.0, below=1.0)


def _count(default: int | None, *, free: bool = False) -> Any:
    return option(default, minimum=1, free=free)


def _group(section: type) -> Any:
    return dataclasses.field(default_factory=section)


@dataclass(frozen=True)
class TextFilesConfig:
    """Parallel text: one sentence a line, LF ends a line, plain or .gz. A TSV holds `source TAB target` lines.

    Files may move between two starts of a run: it is their content that a resume must repeat.
    """

    train_source: str | None = option(None, free=True)
    train_target: str | None = option(None, free=True)
    validation_source: str | None = option(None, free=True)
    validation_target: str | None = option(None, free=True)
    test_source: str | None = option(None, free=True)
    test_target: str | None = option(None, free=True)
    train_tsv: str | None = option(None, free=True)
    validation_tsv: str | None = option(None, free=True)
    test_tsv: str | None = option(None, free=True)


@dataclass(frozen=True)
class TfdsConfig:
    """A TFDS translation set. `Config.source_language` picks the direction whatever the set's own key order."""

    name: str = 'wmt14_translate/de-en'
    data_dir: str | None = option(None, free=True)  # where sets lie; it is their content that a resume must repeat
    train_split: str = 'train'
    validation_split: str = 'validation'
    test_split: str = 'test'


@dataclass(frozen=True)
class GrammarConfig:
    """The built-in English-German task. `level` picks how much of the grammar and lexicon is used."""

    level: str = option('quickstart', choices=('quickstart', 'full', 'lengths'))
    num_train: int = _count(60_000)
    num_validation: int = _count(500)
    num_test: int = _count(1_200)


@dataclass(frozen=True)
class CopyingConfig:
    """Random symbol strings to be copied or reversed: the smallest task that needs cross-attention."""

    task: str = option('copy', choices=('copy', 'reverse'))
    num_symbols: int = option(20, minimum=2)
    min_length: int = _count(3)
    max_length: int = _count(10)
    num_train: int = _count(10_000)
    num_validation: int = _count(200)
    num_test: int = _count(200)


@dataclass(frozen=True)
class DataConfig:
    """Which text, and how it becomes batches."""

    source: str = 'grammar'  # one of data.SOURCES
    batching: str = option('buckets', choices=('buckets', 'packing'))
    batch_tokens: int = _count(4096)  # most target slots, padding included, of a micro-batch of all devices
    max_length: int = option(128, minimum=2)  # subwords with eos, a side; longer training pairs are dropped and counted
    num_buckets: int = _count(8)  # at most this many compiled training shapes
    prefetch: int = _count(4, free=True)  # batches made ahead of the step
    cache_dir: str | None = option(None, free=True)  # prepared ids; None = inside the run folder
    text_files: TextFilesConfig = _group(TextFilesConfig)
    tfds: TfdsConfig = _group(TfdsConfig)
    grammar: GrammarConfig = _group(GrammarConfig)
    copying: CopyingConfig = _group(CopyingConfig)


@dataclass(frozen=True)
class VocabularyConfig:
    """Joint SentencePiece BPE with byte fallback; `size` counts pad, eos, unk, bos and the 256 byte pieces."""

    size: int = option(37_000, minimum=8)
    model_file: str | None = None  # a SentencePiece model to use as it is; None = train one on the training text
    byte_fallback: bool = True
    character_coverage: float = option(1.0, above=0.0, maximum=1.0)
    normalization: str = option('nmt_nfkc', choices=('nmt_nfkc', 'nfkc', 'identity'))
    num_training_lines: int = _count(2_000_000)  # at most this many lines of each side train the vocabulary


@dataclass(frozen=True)
class AttentionConfig:
    """Defaults of all three uses of attention. Paper section 3.2."""

    kind: str = 'dot'  # the mathematics; see attention.VARIANTS. Your own: module:name
    impl: str = option('auto', free=True)  # how it is computed
    num_heads: int = _count(8)
    num_kv_heads: int | None = _count(None)  # None = num_heads; 1 = multi-query; between = grouped-query
    head_dim: int = _count(64)  # d_k
    value_dim: int | None = _count(None)  # d_v; None = head_dim
    scale: str | None = option('inverse_sqrt', choices=('inverse_sqrt',))  # 1 / sqrt(d_k); None = the bare product
    window: int | None = _count(None)  # self-attention sees itself and window - 1 positions before (and after)
    window_right: int | None = option(None, minimum=0)  # positions after; None = as many as before
    num_global: int | None = _count(None)  # first positions that see and are seen at any distance (Longformer)
    dropout_rate: float = _rate()  # on the attention weights; the paper has none
    use_bias: bool = False  # on the q, k, v and output projections; the paper has none
    block_size: int | None = _count(None, free=True)  # queries and keys at a time; None = the implementation's own
    num_features: int = _count(256)  # random features of performer
    feature_seed: int = option(0, minimum=0)  # what they are drawn from
    rank: int = _count(64)  # rows that low_rank projects keys and values to
    score_dim: int | None = _count(None)  # d_a of additive and concat; None = head_dim


# Where a Transformer attends; each has an overlay of the common settings in `ModelConfig`.
ATTENTION_USES = ('encoder_self', 'decoder_self', 'cross')


@dataclass(frozen=True)
class AttentionOverlayConfig:
    """What one use of attention changes of the common settings; `None` keeps the common value.

    What the common settings turn on can't be turned off here: turn it on in the overlays of the other uses instead.
    """

    kind: str | None = None
    impl: str | None = option(None, free=True)
    num_heads: int | None = _count(None)
    num_kv_heads: int | None = _count(None)
    head_dim: int | None = _count(None)
    value_dim: int | None = _count(None)
    scale: str | None = option(None, choices=('inverse_sqrt',))
    window: int | None = _count(None)
    window_right: int | None = option(None, minimum=0)
    num_global: int | None = _count(None)
    dropout_rate: float | None = _rate(None)
    use_bias: bool | None = None
    block_size: int | None = _count(None, free=True)
    num_features: int | None = _count(None)
    feature_seed: int | None = option(None, minimum=0)
    rank: int | None = _count(None)
    score_dim: int | None = _count(None)

    def over(self, common: AttentionConfig) -> AttentionConfig:
        """The common settings with this overlay's own values on top."""
        changes = {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None}
        return dataclasses.replace(common, **changes)


@dataclass(frozen=True)
class RecurrenceConfig:
    """The recurrent encoder-decoder, and recurrence as the token-mixing layer of a Transformer's stack."""

    cell: str = option('gru', choices=('rnn', 'lstm', 'gru'))
    attention: str = option('bahdanau', choices=('none', 'bahdanau', 'luong'))  # of the decoder; none = a fixed vector
    luong_score: str = option('general', choices=('dot', 'general', 'concat'))
    input_feeding: bool = True  # luong: the attentional vector is an input of the next step


@dataclass(frozen=True)
class ConvolutionConfig:
    """The convolutional encoder-decoder, and convolution as the token-mixing layer of a Transformer's stack."""

    kernel_width: int = option(3, minimum=2)
    dilation: int = _count(1)  # of the first layer
    dilation_growth: int = _count(1)  # each further layer's dilation is the one before times this
    separable: bool = False  # depth-wise, then point-wise


@dataclass(frozen=True)
class EncoderOnlyConfig:
    """Masked language modelling with an encoder alone. Devlin et al. 2019 (BERT), section 3.1 and appendix A."""

    side: str = option('source', choices=('source', 'target'))  # of each pair: the text that is modelled
    selected_rate: float = option(0.15, above=0.0, maximum=1.0)  # of the subwords: those to be predicted
    masked_share: float = option(0.8, minimum=0.0, maximum=1.0)  # of those: read as the mask symbol
    random_share: float = option(0.1, minimum=0.0, maximum=1.0)  # of those: read as a random subword; others stay
    embedding_norm: bool = True  # normalises the sum of embedding and position
    prediction_layer: bool = True  # a dense layer, the activation and a norm before the vocabulary projection


@dataclass(frozen=True)
class DecoderOnlyConfig:
    """One causal stack: a language model of the target side, or translation with the source as a prefix."""

    task: str = option('translation', choices=('translation', 'language_model'))
    prefix: str = option('bidirectional', choices=('bidirectional', 'causal'))  # how the source sees itself


@dataclass(frozen=True)
class ModelConfig:
    """The paper's base model unless changed. Section 3, Table 3."""

    family: str = 'encoder_decoder'  # one of models.MODELS
    d_model: int = _count(512)
    d_ff: int = _count(2048)
    num_encoder_layers: int = _count(6)
    num_decoder_layers: int = _count(6)
    max_length: int = option(256, minimum=2)  # longest source or target, subwords with eos; rows of learned positions
    attention: AttentionConfig = _group(AttentionConfig)
    encoder_self: AttentionOverlayConfig = _group(AttentionOverlayConfig)
    decoder_self: AttentionOverlayConfig = _group(AttentionOverlayConfig)
    cross: AttentionOverlayConfig = _group(AttentionOverlayConfig)
    encoder_mixing: str = option('attention', choices=('attention', 'recurrence', 'convolution'))  # section 4, Table 1
    decoder_mixing: str = option('attention', choices=('attention', 'recurrence', 'convolution'))
    recurrence: RecurrenceConfig = _group(RecurrenceConfig)
    convolution: ConvolutionConfig = _group(ConvolutionConfig)
    encoder_only: EncoderOnlyConfig = _group(EncoderOnlyConfig)
    decoder_only: DecoderOnlyConfig = _group(DecoderOnlyConfig)
    positions: str = 'sinusoidal'  # one of positions.SCHEMES
    relative_clip: int = _count(16)  # shaw: offsets beyond this count as this; k in the paper of Shaw et al.
    rope_base: float = option(10_000.0, above=1.0)  # rates fall from 1 to nearly 1 / this, in radians a position
    rope_scaling: float = option(1.0, above=0.0)  # positions are divided by this: longer texts than were trained on
    t5_buckets: int = option(32, minimum=4)  # of offsets, each with a bias of its own
    t5_max_distance: int = option(128, minimum=2)  # offsets from here on share the last bucket
    sinusoid_layout: str = option('interleaved', choices=('interleaved', 'concatenated', 'tensor2tensor'))
    activation: str = option('relu', choices=('relu', 'gelu', 'gelu_tanh', 'swish', 'swiglu'))
    norm: str = option('layer_norm', choices=('layer_norm', 'rms_norm'))
    norm_order: str = option('post', choices=('post', 'pre'))
    norm_epsilon: float = option(1e-6, above=0.0)
    tie_embeddings: str = option('all', choices=('all', 'output', 'none'))  # source = target = output; target = output
    scale_embedding: bool = True  # times sqrt(d_model), section 3.4
    output_bias: bool = False  # a bias on the logits; Marian has one
    vocab_pad_multiple: int = _count(1)  # rows of the table are padded to a multiple of this, for sharding
    dropout_rate: float = _rate(0.1)  # on sublayer outputs and on embedding + position sums
    activation_dropout_rate: float = _rate()  # inside the feed-forward layer; the paper has none
    init_scale: float = option(1.0, above=0.0)  # variance of the sublayers' first kernels, times Glorot's
    compute_dtype: str = option('float32', choices=('float32', 'bfloat16'))  # parameters stay float32

    def attention_of(self, use: str) -> AttentionConfig:
        """The settings of one of `ATTENTION_USES`. A common window is of self-attention alone."""
        common = self.attention
        if use == 'cross':
            common = dataclasses.replace(common, window=None, window_right=None, num_global=None)
        return getattr(self, use).over(common)


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate by update, the first update being step 1. `warmup` is the formula of section 5.3."""

    name: str = option('warmup', choices=('warmup', 'constant', 'cosine', 'inverse_sqrt'))
    factor: float = option(1.0, above=0.0)  # multiplies the paper's formula
    peak: float = option(7e-4, above=0.0)  # of the other schedules
    warmup_steps: int | None = _count(4000)  # None = no warm-up
    decay_steps: int | None = _count(None)  # of cosine; None = train.steps
    final_fraction: float = option(0.0, minimum=0.0, maximum=1.0)  # cosine ends at peak times this


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with the paper's constants. Section 5.3."""

    name: str = option('adam', choices=('adam', 'adamw', 'adafactor', 'lion'))
    beta1: float = _rate(0.9)
    beta2: float = _rate(0.98)
    epsilon: float = option(1e-9, above=0.0)
    weight_decay: float | None = option(None, above=0.0)  # adamw and lion only
    clip_norm: float | None = option(None, above=0.0)  # global norm; the paper clips nothing
    schedule: ScheduleConfig = _group(ScheduleConfig)


@dataclass(frozen=True)
class TrainConfig:
    """One training. Sections 5.3 and 5.4."""

    steps: int = option(100_000, minimum=1, free=True)  # updates
    accumulation: int = _count(1)  # micro-batches an update; gradients are weighted by their tokens
    label_smoothing: float = _rate(0.1)
    smoothing_over: str = option('all', choices=('all', 'others'))  # paper: all V entries; t2t: the V-1 wrong ones
    loss_block_tokens: int = _count(512, free=True)  # tokens whose logits exist at once
    ema_decay: float | None = option(None, above=0.0, below=1.0)  # exponential moving average of the parameters
    max_bad_steps: int = option(10, minimum=0, free=True)  # updates with non-finite gradients in a row before stopping
    prng: str = option('rbg', choices=('rbg', 'threefry2x32', 'unsafe_rbg'))  # of dropout


@dataclass(frozen=True)
class EvaluationConfig:
    """What is evaluated during training, and how large its batches are."""

    every_steps: int | None = _count(None, free=True)  # loss and perplexity on the validation split; None = at the end
    bleu: bool = option(True, free=True)  # translate as well
    max_pairs: int | None = _count(None, free=True)  # first pairs of the split used during training; None = all
    patience: int | None = _count(None, free=True)  # evaluations without a better score before stopping early
    score: str = option('bleu', choices=('bleu', 'loss'), free=True)  # what "best" and patience look at
    batch_tokens: int = _count(8192, free=True)  # slots of one side a batch


@dataclass(frozen=True)
class CheckpointConfig:
    """How often checkpoints are written, and which are kept."""

    every_steps: int = _count(1000, free=True)
    keep_newest: int = _count(1, free=True)  # checkpoints
    keep_best: int = _count(1, free=True)  # checkpoints, by `evaluation.score`
    average_keep: int = _count(5, free=True)  # parameters-only snapshots kept for averaging
    average_every_steps: int | None = _count(None, free=True)  # None = whenever a checkpoint is written


@dataclass(frozen=True)
class DecodingConfig:
    """Section 6.1: beam 4, alpha 0.6, at most source length + 50."""

    method: str = option('beam', choices=('greedy', 'beam', 'sampling'), free=True)
    beam_size: int = _count(4, free=True)
    alpha: float = option(0.6, free=True)  # length penalty; 0 = none
    length_penalty: str = option('gnmt', choices=('gnmt', 'power'), free=True)  # ((5 + L) / 6)^alpha or L^alpha
    stop: str = option('exact', choices=('exact', 'heuristic'), free=True)  # see decoding.hypotheses.StopRule
    max_extra_length: int = option(50, minimum=0, free=True)  # target may be this much longer than the source
    min_length: int = option(0, minimum=0, free=True)  # subwords before eos may come
    temperature: float = option(1.0, above=0.0, free=True)
    top_k: int | None = _count(None, free=True)
    top_p: float | None = option(None, above=0.0, maximum=1.0, free=True)
    batch_size: int = _count(64, free=True)  # sentences at a time


@dataclass(frozen=True)
class MeshConfig:
    """How many ways each mesh axis splits; their product is the number of devices.

    `data` and `fsdp` split the rows of a batch, `fsdp` the width of every parameter (and its gradient and optimizer
    state) as well; `model` splits heads, feed-forward layers and the vocabulary, `sequence` the length of a batch.
    """

    data: int | None = _count(None, free=True)  # None = what the others leave
    fsdp: int = _count(1, free=True)
    model: int = _count(1, free=True)
    sequence: int = _count(1, free=True)


@dataclass(frozen=True)
class HostsConfig:
    """How long the processes of a job wait for one another, in seconds."""

    start_seconds: int = _count(300, free=True)  # for all of them to come
    silence_seconds: int = _count(30, free=True)  # without a sign of life before a process counts as lost
    stall_seconds: int | None = _count(900, free=True)  # for one update, or its data; None = as long as it takes


@dataclass(frozen=True)
class ExecutionConfig:
    """How the same mathematics is run; everything here may differ between two runs of one model."""

    mesh: MeshConfig = _group(MeshConfig)
    hosts: HostsConfig = _group(HostsConfig)
    unroll: int | None = _count(None, free=True)  # layers a loop turn holds; None = all of them, no loop
    remat: str = option('none', choices=('none', 'full', 'dots', 'names', 'narrow'), free=True)
    compilation_cache: str | None = option(None, free=True)  # folder of compiled programs; None = off


@dataclass(frozen=True)
class LoggingConfig:
    """What is reported of a training, and how often."""

    every_steps: int = _count(50, free=True)
    tensorboard: bool = option(True, free=True)


@dataclass(frozen=True)
class Config:
    """One run."""

    seed: int = option(0, minimum=0)
    source_language: str = 'en'  # of a TFDS set; elsewhere for the record
    target_language: str = 'de'  # the same, and how translations are scored: see evaluation.bleu
    data: DataConfig = _group(DataConfig)
    vocabulary: VocabularyConfig = _group(VocabularyConfig)
    model: ModelConfig = _group(ModelConfig)
    optimizer: OptimizerConfig = _group(OptimizerConfig)
    train: TrainConfig = _group(TrainConfig)
    evaluation: EvaluationConfig = _group(EvaluationConfig)
    checkpoint: CheckpointConfig = _group(CheckpointConfig)
    decoding: DecodingConfig = _group(DecodingConfig)
    execution: ExecutionConfig = _group(ExecutionConfig)
    logging: LoggingConfig = _group(LoggingConfig)


class ConfigError(ValueError):
    """A config that can't run; the message names the field, the value, the rule and the choices."""


def walk(section: Any, prefix: str = '') -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yields `(dotted path, field, value)` for every leaf of a config section."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        path = f'{prefix}{field.name}'
        if dataclasses.is_dataclass(value):
            yield from walk(value, path + '.')
        else:
            yield path, field, value


def require_choice(path: str, value: Any, choices: Iterable[str], also: str = '') -> None:
    """Raises `ConfigError` for a value that is none of the choices, with the nearest; `also` says what else may be."""
    known = list(choices)
    if value in known:
        return
    nearest = difflib.get_close_matches(str(value), known, n=1)
    hint = f' (did you mean {nearest[0]!r}?)' if nearest else ''
    raise ConfigError(f'{path} is {value!r}; it must be one of {", ".join(map(repr, known))}{hint}{also}')


def refuse_ignored(section: Any, path: str, ignored: Mapping[str, str]) -> None:
    """Raises `ConfigError` for a field of a section that was changed although it has no effect.

    `path` is that of the section; `ignored` has the dotted path in it of a field or of a group of them, and why it has
    none.
    """
    default = {name: value for name, _, value in walk(type(section)())}
    for name, _, value in walk(section):
        for prefix, reason in ignored.items():
            if (name == prefix or name.startswith(f'{prefix}.')) and value != default[name]:
                raise ConfigError(f'{path}.{name} is {value!r}, but {reason}; leave it {default[name]!r}')


def refuse_unread(section: Any, path: str, field: str, reads: Mapping[str, Collection[str]]) -> None:
    """Raises `ConfigError` for a changed field of a section that only other choices of its `field` read.

    `reads` has, for each choice, the fields that are its own, maybe shared with others.
    """
    choice, ignored = getattr(section, field), {}
    for name in sorted(set().union(*reads.values()) - set(reads[choice])):
        readers = ', '.join(repr(other) for other, own in reads.items() if name in own)
        ignored[name] = f'{path}.{field}={choice!r} does not read it (read by {readers})'
    refuse_ignored(section, path, ignored)


def allowed_types(field: dataclasses.Field) -> tuple[type, ...]:
    """The types a leaf field may hold, `NoneType` among them where the field may be off."""
    return typing.get_args(field.type) or (typing.cast(type, field.type),)


def check(config: Config) -> None:
    """Checks every leaf's type and rule, then the rules that join fields. Raises `ConfigError`."""
    for path, field, value in walk(config):
        _check_leaf(f'config.{path}', field, value)
    model = config.model
    if model.d_model % 2 and model.positions == 'sinusoidal':
        nearest = f'{model.d_model - 1} or {model.d_model + 1}' if model.d_model > 1 else '2'
        raise ConfigError(
            f'config.model.d_model is {model.d_model}; sinusoidal positions need an even width: {nearest}'
        )
    if config.data.max_length > model.max_length:
        raise ConfigError(
            f'config.data.max_length is {config.data.max_length}, above config.model.max_length {model.max_length}; '
            'raise the model length or lower the data length'
        )
    if config.data.batch_tokens < config.data.max_length:
        raise ConfigError(
            f'config.data.batch_tokens is {config.data.batch_tokens}, below config.data.max_length '
            f'{config.data.max_length}: one pair of that length would not fit into a batch'
        )
    if config.data.batching == 'packing':
        why = "config.data.batching is 'packing', which has one shape"
        refuse_ignored(config.data, 'config.data', {'num_buckets': why})
    if config.evaluation.every_steps is None:
        why = 'config.evaluation.every_steps is None, so there is one evaluation, at the end'
        refuse_ignored(config.evaluation, 'config.evaluation', {'patience': why})
    if config.evaluation.score == 'bleu' and not config.evaluation.bleu:
        raise ConfigError("config.evaluation.score is 'bleu', but config.evaluation.bleu is False; use score='loss'")


def _check_leaf(path: str, field: dataclasses.Field, value: Any) -> None:
    types = allowed_types(field)
    if type(value) not in types and not (float in types and type(value) is int):
        names = ' or '.join('None' if t is type(None) else t.__name__ for t in types)
        raise ConfigError(f'{path} is {value!r}, a {type(value).__name__}; it must be {names}')
    if value is None:
        return
    rule = field.metadata
    if rule.get('choices'):
        require_choice(path, value, rule['choices'])
    bounds = (
        ('minimum', 'at least', lambda bound: value >= bound),
        ('maximum', 'at most', lambda bound: value <= bound),
        ('above', 'above', lambda bound: value > bound),
        ('below', 'below', lambda bound: value < bound),
    )
    for name, words, holds in bounds:
        if (bound := rule.get(name)) is not None and not holds(bound):
            raise ConfigError(f'{path} is {value!r}; it must be {words} {bound}')
