"""Small numbers that a textbook works out by hand, where no other test has them."""

import jax
import jax.numpy as jnp

from transformer_jax.attention.api import attention_and_weights
from transformer_jax.attention.mask import Mask
from transformer_jax.config import AttentionConfig, Config
from transformer_jax.models import uses_of_attention

BERT_LAYERS, BERT_HEADS, BYTES = 12, 12, 2


def probabilities_of_one_sequence(length):
    """Bytes of the attention probabilities of all layers, from the shapes of `dense`."""
    config = AttentionConfig(impl='dense', num_heads=BERT_HEADS)
    rows = jax.ShapeDtypeStruct((1, length, BERT_HEADS, 64), jnp.bfloat16)
    ones = jnp.ones((1, length), jnp.int32)
    _, weights = jax.eval_shape(
        lambda q, k, v: attention_and_weights(q, k, v, Mask(ones, ones, ones, ones), config), rows, rows, rows
    )
    return BERT_LAYERS * weights.size * BYTES


def test_attention_probabilities_of_berts_shape():
    assert round(probabilities_of_one_sequence(512) / 1e6, 1) == 75.5
    assert round(probabilities_of_one_sequence(8192) / 1e9, 1) == 19.3


def test_the_base_model_has_heads_of_64_and_12_self_attention_sublayers():
    config = Config()
    model = config.model
    assert model.d_model // model.attention.num_heads == model.attention.head_dim == 64
    own = {use.name for use in uses_of_attention(config) if not use.cross}
    assert own == {'encoder_self', 'decoder_self'}
    assert model.num_encoder_layers + model.num_decoder_layers == 12
