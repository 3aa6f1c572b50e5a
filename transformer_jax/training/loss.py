"""The training loss: label-smoothed cross-entropy, a sum over the tokens to predict. Section 5.4."""

import jax

from transformer_jax.config import TrainConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models.interface import Model
from transformer_jax.models.likelihood import cross_entropy, label_smoothing
from transformer_jax.shapes import Array, Float, Params, PRNGKey


def loss_sum(
    model: Model,
    params: Params,
    batch: Batch,
    config: TrainConfig,
    *,
    dropout_rng: PRNGKey | None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Float[Array, ''], Float[Array, '']]:
    """The smoothed loss and the plain negative log-likelihood, in nats, summed over the targets of `model.objective`.

    A sum, not a mean: whoever divides it by the global token count gets gradients that no split of the batch changes.
    """
    return cross_entropy(
        model,
        params,
        model.hidden(params, batch, dropout_rng=dropout_rng),
        batch.targets,
        batch.target_segment_ids > 0,
        smoothing=label_smoothing(config.label_smoothing, model.vocab_size, config.smoothing_over),
        block_tokens=config.loss_block_tokens,
        mesh=mesh,
    )
