"""The parameter tree of `models.encoder_decoder` from the tensors of a Hugging Face `MarianMTModel`."""

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.positions.sinusoidal import sinusoids

# The types of safetensors that weights come in; its own numpy reader knows no bfloat16.
_DTYPES = {'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': jnp.bfloat16}


def read_tensors(folder: epath.PathLike) -> dict[str, np.ndarray]:
    """Every tensor of `model.safetensors` or of the shards that its index lists, as float32."""
    folder = epath.Path(folder)
    index = folder / 'model.safetensors.index.json'
    if index.exists():
        names = sorted(set(json.loads(index.read_text())['weight_map'].values()))
    else:
        names = ['model.safetensors']
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        path = folder / name
        if not path.exists():
            others = sorted(other.name for other in folder.iterdir() if other.suffix in ('.bin', '.pt', '.h5', '.npz'))
            hint = f' (it holds {", ".join(others)}: save it anew with safe_serialization=True)' if others else ''
            raise ConfigError(f'{path} does not exist; weights are read from safetensors alone{hint}')
        tensors |= _read_file(path)
    return tensors


def _read_file(path: epath.Path) -> dict[str, np.ndarray]:
    import safetensors

    try:
        stored = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise ConfigError(f'{path} is damaged or not a safetensors file: {error}') from error
    tensors = {}
    for name, tensor in stored:
        if tensor['dtype'] not in _DTYPES:
            raise ConfigError(f'{path}: {name} is of type {tensor["dtype"]}; it must be one of {", ".join(_DTYPES)}')
        values = np.frombuffer(tensor['data'], _DTYPES[tensor['dtype']])
        tensors[name] = values.reshape(tensor['shape']).astype(np.float32)
    return tensors


def convert_parameters(tensors: Mapping[str, np.ndarray], config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The parameter tree of `models.encoder_decoder` from Hugging Face's tensors.

    Raises `ConfigError` when a tensor is missing or left over, when layers differ in shape, and when tables that the
    config ties differ in value.
    """
    reader = _Reader(tensors)
    _check_positions(reader, config)
    source, target, output = _read_tables(reader, config.tie_embeddings)
    parameters: dict[str, Any] = {
        'target_embedding': {'table': target},
        'encoder': {'layers': _stack(reader, 'encoder', config.num_encoder_layers, config)},
        'decoder': {'layers': _stack(reader, 'decoder', config.num_decoder_layers, config)},
    }
    if config.tie_embeddings != 'all':
        parameters['source_embedding'] = {'table': source}
    if config.tie_embeddings == 'none':
        parameters['output_table'] = output
    # Hugging Face itself takes a missing bias for zeros.
    bias = reader.take('final_logits_bias') if reader.has('final_logits_bias') else np.zeros(vocab_size, np.float32)
    parameters['output_bias'] = bias.reshape(-1)
    reader.check_all_taken()
    return parameters


def _read_tables(reader: '_Reader', tie_embeddings: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tables of the source, of the target and of the output. A writer may store any one name of a tied group."""
    shared, source = 'model.shared.weight', 'model.encoder.embed_tokens.weight'
    target, output = 'model.decoder.embed_tokens.weight', 'lm_head.weight'
    stored = {name: reader.take(name) for name in (source, target, output, shared) if reader.has(name)}

    def pick(*names: str, tied: bool) -> np.ndarray:
        found = [name for name in names if name in stored]
        if not found:
            raise ConfigError(f'the weights lack {" or ".join(names)}')
        differing = [name for name in found if tied and not np.array_equal(stored[name], stored[found[0]])]
        if differing:
            raise ConfigError(f'config.json ties {found[0]} and {", ".join(differing)}, but the weights differ')
        return stored[found[0]]

    if tie_embeddings == 'all':
        table = pick(shared, source, target, output, tied=True)
        return table, table, table
    if tie_embeddings == 'output':
        table = pick(target, output, tied=True)
        return pick(source, tied=False), table, table
    return pick(source, shared, tied=False), pick(target, shared, tied=False), pick(output, tied=False)


class _Reader:
    """Tensors by name, each taken once or missed by name."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = tensors
        self._left = set(tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise ConfigError(f'the weights lack {name}')
        self._left.discard(name)
        return self._tensors[name]

    def check_all_taken(self) -> None:
        if self._left:
            raise ConfigError(
                f'the weights hold what config.json does not account for: {", ".join(sorted(self._left))}'
            )


def _stack(reader: _Reader, side: str, num_layers: int, config: ModelConfig) -> dict[str, Any]:
    """The layers of one side, each parameter with the layers' axis in front."""
    own = config.encoder_self if side == 'encoder' else config.decoder_self
    attentions = {'self_attention': ('self_attn', own)}
    if side == 'decoder':
        attentions['cross_attention'] = ('encoder_attn', config.cross)

    def stack(name: str, shape: tuple[int, ...] | None = None, *, transpose: bool = False) -> np.ndarray:
        layers = [reader.take(f'model.{side}.layers.{index}.{name}') for index in range(num_layers)]
        try:
            stacked = np.stack([layer.T if transpose else layer for layer in layers])
            return stacked if shape is None else stacked.reshape(num_layers, *shape)
        except ValueError as error:
            shapes = ', '.join(str(layer.shape) for layer in layers)
            raise ConfigError(f'model.{side}.layers: {name} has the shapes {shapes}; config.json has others') from error

    def norm(name: str) -> dict[str, Any]:
        return {'norm': {'scale': stack(f'{name}.weight'), 'bias': stack(f'{name}.bias')}}

    def dense(name: str) -> dict[str, Any]:
        return {'kernel': stack(f'{name}.weight', transpose=True), 'bias': stack(f'{name}.bias')}

    layers: dict[str, Any] = {
        'feed_forward': {'expand': dense('fc1'), 'contract': dense('fc2')},
        'feed_forward_residual': norm('final_layer_norm'),
    }
    for ours, (theirs, use) in attentions.items():
        attention = use.over(config.attention)
        heads, width = (attention.num_heads, attention.head_dim), config.d_model
        layers[ours] = {
            name: {
                'kernel': stack(f'{theirs}.{name[0]}_proj.weight', (width, *heads), transpose=True),
                'bias': stack(f'{theirs}.{name[0]}_proj.bias', heads),
            }
            for name in ('query', 'key', 'value')
        }
        layers[ours]['output'] = {
            'kernel': stack(f'{theirs}.out_proj.weight', (*heads, width), transpose=True),
            'bias': stack(f'{theirs}.out_proj.bias'),
        }
        layers[f'{ours}_residual'] = norm(f'{theirs}_layer_norm')
    return layers


def _check_positions(reader: _Reader, config: ModelConfig) -> None:
    """Older folders store the position table; it must be the sinusoids that we compute."""
    for name in ('model.encoder.embed_positions.weight', 'model.decoder.embed_positions.weight'):
        if not reader.has(name):
            continue
        stored = reader.take(name)
        table = sinusoids(len(stored), config.d_model, config.sinusoid_layout)
        if stored.shape != table.shape or np.abs(stored - table).max() > 1e-3:  # stored in half precision at times
            raise ConfigError(f'{name} is not the table of sines and cosines that this model has')
