"""The verb `train`: opens the run folder and the data, and hands the loop what it needs."""

import time

import jax
from etils import epath

from transformer_jax import models
from transformer_jax.checkpoints.run_folder import RunFolder, versions
from transformer_jax.checkpoints.store import Store
from transformer_jax.config import Config
from transformer_jax.data.corpus import Corpus, open_corpus
from transformer_jax.data.pipeline import TrainingBatches
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.evaluator import Evaluator
from transformer_jax.models.interface import Model
from transformer_jax.overlay import config_to_dict, fixed_differences
from transformer_jax.parallel.mesh import make_mesh, num_data_shards
from transformer_jax.training.loop import train
from transformer_jax.training.reporting import Reporter


def train_run(config: Config, run_dir: epath.PathLike) -> int | None:
    """Starts a run, or goes on with the one in the folder. Returns the signal that stopped it, or None when done."""
    models.validate(config)
    primary = jax.process_index() == 0
    with RunFolder.start(run_dir, config_to_dict(config), fixed_differences, primary=primary) as folder:
        mesh = make_mesh(config.execution.mesh)
        if config.execution.compilation_cache is not None:
            jax.config.update('jax_compilation_cache_dir', config.execution.compilation_cache)
            jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
        corpus = open_corpus(config, folder.vocabulary, folder.data)
        folder.check_vocabulary(corpus.vocabulary.fingerprint)
        batches = TrainingBatches(
            corpus.prepared('train'),
            config.data,
            vocabulary=corpus.vocabulary,
            seed=config.seed,
            rows_multiple=num_data_shards(mesh),
            group=config.train.accumulation,
            host_index=jax.process_index(),
            num_hosts=jax.process_count(),
        )
        model = models.build(
            config.model,
            vocab_size=corpus.vocabulary.size,
            start_id=corpus.vocabulary.start_id,
            execution=config.execution,
        )
        store = Store(folder, config.checkpoint, report=print)
        latest = store.latest() or 0
        if latest >= config.train.steps:
            print(f'the run in {folder.path} is done: it has {latest:,} updates of {config.train.steps:,}')
            return None
        folder.update_record(**_describe_run(config, batches, mesh))
        with Reporter(
            folder.metrics,
            folder.tensorboard,
            config.logging,
            total_steps=config.train.steps,
            start_step=latest,
            primary=primary,
        ) as reporter:
            _say_data(reporter, corpus, batches)
            evaluate = make_evaluator(config, model, corpus, mesh) if corpus.has('validation') else None
            return train(config, model, batches, store, reporter, mesh, evaluate=evaluate)


def make_evaluator(config: Config, model: Model, corpus: Corpus, mesh: jax.sharding.Mesh) -> Evaluator:
    """What scores the validation split during training."""
    translator = None
    if config.evaluation.bleu:
        # The parameters come with each evaluation.
        translator = Translator(model, {}, corpus.vocabulary, config.decoding)
    return Evaluator(
        model,
        corpus.prepared('validation'),
        corpus.pairs('validation', config.evaluation.max_pairs),
        corpus.vocabulary,
        batch_tokens=config.evaluation.batch_tokens,
        translator=translator,
        target_language=config.target_language,
        mesh=mesh,
    )


def _say_data(reporter: Reporter, corpus: Corpus, batches: TrainingBatches) -> None:
    buckets = ', '.join(f'{b.rows} x ({b.source_length} + {b.target_length})' for b in batches.buckets)
    reporter.say(f'vocabulary: {corpus.vocabulary.size:,} pieces; training pairs: {corpus.source.size("train"):,}')
    reporter.say(
        f'batches: rows x (source + target subwords) of {buckets}; {batches.batches_in_epoch():,} an epoch, '
        f'{batches.padding:.1%} padding'
    )


def _describe_run(config: Config, batches: TrainingBatches, mesh: jax.sharding.Mesh) -> dict:
    """What a reader of the results needs to know besides the config."""
    device = mesh.devices.flat[0]
    return {
        'started': time.strftime('%Y-%m-%dT%H:%M:%S%z'),
        'versions': versions(),
        'devices': {'count': int(mesh.size), 'kind': device.device_kind, 'platform': device.platform},
        'mesh': dict(mesh.shape),
        'attention': {'kind': config.model.attention.kind, 'impl': config.model.attention.impl},
        'normalization': config.vocabulary.normalization,
        'buckets': [bucket._asdict() for bucket in batches.buckets],
        'padding': batches.padding,
        'batches_in_epoch': batches.batches_in_epoch(),
        'dropped_pairs': batches.dropped,
    }
