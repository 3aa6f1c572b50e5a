"""What training, decoding and evaluation may know of a model. Every family in `models.MODELS` meets this protocol.

What a family is for stands in its `task`. Training and likelihood need the methods up to `output_table`: `objective`
says what of a batch is to be predicted, `hidden` and `output_table` predict it. The methods from `encode` on write text
one subword at a time; a family whose task neither translates nor continues text has none of them.

All methods are pure functions of the parameters. In decoding, W is the number of hypotheses a sentence (1 when greedy);
every array leaf of a cache has the sentence axis B first, so that `select` can drop finished sentences.
"""

from typing import Any, NamedTuple, Protocol

import jax

from transformer_jax.data.batch import Batch
from transformer_jax.shapes import Array, Cache, Float, Int, Key, Params, PRNGKey


def abstract_params(model: 'Model') -> Params:
    """The shapes and types of a model's parameters, none of which is made."""
    return jax.eval_shape(model.init, jax.random.key(0))


class Task(NamedTuple):
    """What a model is trained to do, and so what may be asked of it."""

    name: str
    sides: tuple[str, ...]  # of a pair, 'source' and 'target': what the model reads
    predicts: str  # in words: what its likelihood is of
    translates: bool = False  # from source to target
    generates: bool = False  # continues a text


TRANSLATION = Task('translation', ('source', 'target'), 'target subwords', translates=True)
LANGUAGE_MODEL = Task('language modelling', ('target',), 'target subwords', generates=True)


class Model(Protocol):
    task: Task
    vocab_size: int
    start_id: int  # the decoder's first input: bos, or pad as Marian does
    max_length: int  # the longest source or target, subwords with eos

    def init(self, rng: PRNGKey) -> Params:
        """Fresh float32 parameters, as plain nested dicts."""
        ...

    def logical_axes(self) -> Any:
        """The tree of `init` with a tuple of logical axis names (or None) for each parameter's axes."""
        ...

    def objective(self, batch: Batch, rngs: Key[Array, 'B']) -> Batch:
        """The batch as the model learns from it: what `hidden` is given, and what each of its rows is to predict.

        The subwords to predict are `targets` where `target_segment_ids` > 0. `rngs` are keys, one a row: whatever is
        drawn for a subword depends on its row's key and its slot alone.
        """
        ...

    def hidden(self, params: Params, batch: Batch, *, dropout_rng: PRNGKey | None = None) -> Float[Array, 'B T D']:
        """States before the vocabulary projection, one for each of the `targets` of a batch that `objective` made.

        Teacher-forced. Dropout is on when `dropout_rng` is given.
        """
        ...

    def project(self, params: Params, hidden: Float[Array, '... D']) -> Float[Array, '... V']:
        """Float32 logits, V = `vocab_size`."""
        ...

    def output_table(self, params: Params) -> tuple[Float[Array, 'V D'], Float[Array, 'V'] | None]:
        """The matrix (and bias) of the projection, with the rows that `vocab_pad_multiple` adds."""
        ...

    def encode(
        self, params: Params, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'], positions: Int[Array, 'B S']
    ) -> Any:
        """What the decoder needs of the source: a pytree with B first."""
        ...

    def init_decode(self, params: Params, memory: Any, max_length: int) -> Cache:
        """An empty cache of `max_length` target slots, W = 1; cross keys and values are made here, once a sentence."""
        ...

    def prefill(
        self, params: Params, tokens: Int[Array, 'B P'], lengths: Int[Array, 'B'], cache: Cache
    ) -> tuple[Float[Array, 'B P V'], Cache]:
        """Reads a whole target prefix at once into an empty cache (W = 1).

        `tokens[:, 0]` is the start id, the forced prefix follows; `lengths[b] >= 1` tokens of row b are real.
        `logits[b, i]` predicts what comes after `tokens[b, i]`. Takes P slots of the cache whatever the lengths.
        """
        ...

    def broadcast(self, cache: Cache, num_hypotheses: int) -> Cache:
        """From W = 1 to W = `num_hypotheses` equal hypotheses; what depends on the source alone is not copied."""
        ...

    def decode_step(
        self, params: Params, tokens: Int[Array, 'B W'], cache: Cache
    ) -> tuple[Float[Array, 'B W V'], Cache]:
        """Reads one token for each hypothesis; takes one slot. Reading past the last slot is the caller's error."""
        ...

    def reorder(self, cache: Cache, parents: Int[Array, 'B W']) -> Cache:
        """Hypothesis w of sentence b continues what hypothesis `parents[b, w]` was."""
        ...

    def select(self, cache: Cache, sentences: Int[Array, 'C']) -> Cache:
        """Keeps these sentences (indices into B, repeats allowed), in this order."""
        ...

    def grow(self, cache: Cache, max_length: int) -> Cache:
        """The same cache with room for `max_length` target slots."""
        ...
