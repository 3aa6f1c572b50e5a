"""The verb `train`: puts the parts of a run together and hands them to the training loop."""

import os

import jax

from transformer_jax import models
from transformer_jax.checkpoints.run_folder import RunFolder, versions
from transformer_jax.checkpoints.store import Store
from transformer_jax.commands.opening import make_evaluator, say
from transformer_jax.config import Config
from transformer_jax.data.corpus import open_corpus
from transformer_jax.data.pipeline import TrainingBatches
from transformer_jax.overlay import config_to_dict, fixed_differences
from transformer_jax.parallel.mesh import make_mesh, num_data_shards
from transformer_jax.training.loop import train
from transformer_jax.training.reporting import Reporter


def train_run(config: Config, run_dir: str | os.PathLike[str]) -> int | None:
    """Trains a new run, or resumes the one in the folder. Returns the signal that stopped it, or None when done."""
    models.validate(config)
    if config.execution.compilation_cache is not None:
        jax.config.update('jax_compilation_cache_dir', config.execution.compilation_cache)
    with RunFolder.start(run_dir, config_to_dict(config), fixed_differences) as folder:
        corpus = open_corpus(config, folder.vocabulary, folder.data, report=say)
        folder.check_vocabulary(corpus.vocabulary.fingerprint)
        folder.update_record(versions=versions(), devices=[str(device) for device in jax.devices()])
        mesh = make_mesh(config.execution.mesh)
        vocabulary = corpus.vocabulary
        model = models.build(
            config.model, vocab_size=vocabulary.size, start_id=vocabulary.start_id, execution=config.execution
        )
        batches = TrainingBatches(
            corpus.prepared('train'),
            config.data,
            vocabulary=vocabulary,
            seed=config.seed,
            rows_multiple=num_data_shards(mesh),
            group=config.train.accumulation,
            report=say,
        )
        evaluate = None
        if corpus.has('validation'):
            evaluation = config.evaluation
            evaluate = make_evaluator(
                config, model, corpus, 'validation', max_pairs=evaluation.max_pairs, bleu=evaluation.bleu, mesh=mesh
            )
        with Store(folder, config.checkpoint, report=say) as store:
            start_step = store.latest() or 0
            with Reporter(
                folder.metrics,
                folder.tensorboard,
                config.logging,
                total_steps=config.train.steps,
                start_step=start_step,
            ) as reporter:
                return train(config, model, batches, store, reporter, mesh, evaluate=evaluate)
