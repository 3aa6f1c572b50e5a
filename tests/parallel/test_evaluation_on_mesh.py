"""A model whose parameters are split is evaluated and translates as it does whole on one device."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.evaluation.test_evaluator import make_pairs, prepare_pairs
from tests.models.tiny import make_params
from tests.parallel.meshed import CONFIG, num_devices
from transformer_jax import models
from transformer_jax.config import DecodingConfig, ExecutionConfig, MeshConfig, VocabularyConfig
from transformer_jax.data.vocabulary_training import train_vocabulary
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.evaluator import Evaluator
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.parallel.rules import sharding_tree

MESHES = [
    MeshConfig(data=8),
    MeshConfig(data=1, fsdp=4),
    MeshConfig(data=1, model=4),
    MeshConfig(data=2, fsdp=2, model=2),
    MeshConfig(data=2, model=2, sequence=2),
]


def evaluate(config: MeshConfig | None, folder: Path, tie_embeddings: str = 'all') -> tuple[Any, str]:
    """Scores of pairs and their translations on a mesh over the devices of all processes, or on one device."""
    texts = [pair.source for pair in make_pairs(200)]
    vocabulary = train_vocabulary(VocabularyConfig(size=61, byte_fallback=False), texts, report=lambda _: None)
    own = dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings, output_bias=tie_embeddings == 'none')
    execution = ExecutionConfig(unroll=1)
    model = models.build(own, vocab_size=vocabulary.size, start_id=vocabulary.start_id, execution=execution)
    params, pairs, mesh = jax.device_get(make_params(model)), make_pairs(21), None
    if config is not None:
        mesh = make_mesh(config, jax.devices()[: num_devices(config)])
        params = jax.tree.map(jax.device_put, params, sharding_tree(model.logical_axes(), params, mesh))
    translator = Translator(model, {}, vocabulary, DecodingConfig(beam_size=3, batch_size=12, max_extra_length=3))
    prepared = prepare_pairs(pairs, vocabulary, folder / 'ids')
    evaluator = Evaluator(model, prepared, pairs, vocabulary, batch_tokens=200, translator=translator, mesh=mesh)
    evaluator(params)
    assert evaluator.hypotheses is not None
    return evaluator.score_pairs(params), '\n'.join(evaluator.hypotheses)


@pytest.mark.slow
@pytest.mark.parametrize('config', MESHES)
@pytest.mark.parametrize('tie_embeddings', ['all', 'none'])
def test_scores_and_translations_are_those_of_one_device(
    config: MeshConfig, tie_embeddings: str, tmp_path: Path
) -> None:
    expected, lines = evaluate(None, tmp_path / 'one', tie_embeddings)
    found, lines_on_mesh = evaluate(config, tmp_path / 'mesh', tie_embeddings)
    np.testing.assert_allclose(found.nll, expected.nll, rtol=1e-5)
    np.testing.assert_array_equal(found.num_correct, expected.num_correct)
    assert lines_on_mesh == lines
    assert len(set(lines.splitlines())) > 5
