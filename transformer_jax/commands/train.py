"""The verb `train`: puts the parts of a run together and hands them to the training loop."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from transformer_jax import models
from transformer_jax.attention import choose
from transformer_jax.checkpoints.run_folder import RunFolder, versions
from transformer_jax.checkpoints.store import Store
from transformer_jax.commands.evaluator import make_evaluator, say
from transformer_jax.commands.validation import check_config
from transformer_jax.config import Config, ConfigError
from transformer_jax.data import Source, make_source
from transformer_jax.data.corpus import open_corpus, read_contents
from transformer_jax.data.pipeline import TrainingBatches
from transformer_jax.evaluation.evaluator import Evaluator
from transformer_jax.layers.embedding import padded_rows
from transformer_jax.models.interface import Model
from transformer_jax.overlay import config_to_dict, fixed_differences
from transformer_jax.parallel.hosts import Hosts
from transformer_jax.parallel.mesh import SEQUENCE, make_mesh, num_data_shards, rows_of_process
from transformer_jax.training.compilation_cache import CompilationCache
from transformer_jax.training.loop import train
from transformer_jax.training.peak_memory import measure_peak_memory
from transformer_jax.training.profiling import Profile
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.state import check_mesh


def train_run(
    config: Config,
    run_dir: str | os.PathLike[str],
    hosts: Hosts | None = None,
    *,
    profile_steps: tuple[int, int] | None = None,
) -> int | None:
    """Trains a new run, or resumes the one in the folder. Returns the signal that stopped it, or None when done.

    Every process of `hosts` calls this alike; process 0 makes the folder and all in it but the arrays. `profile_steps`
    are the first and the last update to trace.
    """
    begun = time.monotonic()
    hosts = hosts or Hosts()
    tell = _teller(hosts)
    hosts.compare({'config': config_to_dict(config), 'version': versions()})
    check_config(config)
    mesh = make_mesh(config.execution.mesh)
    with hosts.primary_first('reading'):  # what has to be fetched is fetched once
        source = make_source(config, tell)
        contents = read_contents(source)
    hosts.compare({'text': contents})
    with contextlib.ExitStack() as opened:
        cache = opened.enter_context(CompilationCache(config.execution.compilation_cache))
        with hosts.primary_first('preparation'):
            start = RunFolder.start(run_dir, config_to_dict(config), fixed_differences, primary=hosts.primary)
            folder = opened.enter_context(start)
            try:
                _require_trainable(folder)
                # The test split decides nothing in training: another one may come to lie there.
                folder.check_text({split: contents[split] for split in ('train', 'validation') if split in contents})
                prepared = _prepare(config, folder, mesh, source, hosts)
            except ValueError:
                folder.withdraw()
                raise
        hosts.compare(prepared.facts)
        store = opened.enter_context(Store(folder, config.checkpoint, report=tell))
        reporter = opened.enter_context(_make_reporter(config, folder, begun, cache, primary=hosts.primary))
        profile = Profile(profile_steps if hosts.primary else None, folder.tensorboard, reporter.say)
        reporter.say(_describe_batches(prepared.batches))
        reporter.say(_describe_attention(_chosen_attention(config, prepared.batches)))
        signal = train(
            config,
            prepared.model,
            prepared.batches,
            store,
            reporter,
            mesh,
            evaluate=prepared.evaluate,
            hosts=hosts,
            profile=profile,
        )
        if (words := cache.describe()) is not None:
            reporter.say(words)
        folder.update_record(peak_memory=measure_peak_memory(folder.read_record().get('peak_memory')))
        return signal


def _require_trainable(folder: RunFolder) -> None:
    if imported := folder.read_record().get('imported'):
        raise ConfigError(
            f'{folder.path} was imported from {imported["from"]}: it holds parameters alone, without the state of an '
            'optimizer, to translate with and to be evaluated; it can not be trained'
        )


class _Prepared(NamedTuple):
    model: Model
    batches: TrainingBatches
    evaluate: Evaluator | None
    facts: dict[str, Any]  # what every process must have alike


def _prepare(config: Config, folder: RunFolder, mesh: jax.sharding.Mesh, source: Source, hosts: Hosts) -> _Prepared:
    """Makes vocabulary and ids where the folder has none, and says in the record what was chosen.

    Raises `ValueError` for what is not as the run was started with.
    """
    tell = _teller(hosts)
    corpus = open_corpus(config, folder.vocabulary, folder.data, source=source, report=tell)
    vocabulary = corpus.vocabulary
    folder.check_vocabulary(vocabulary.fingerprint)
    model = models.build(
        config.model, vocab_size=vocabulary.size, start_id=vocabulary.start_id, execution=config.execution
    )
    check_mesh(model, mesh)
    rows, size = padded_rows(vocabulary.size, config.model.vocab_pad_multiple), vocabulary.size
    if rows != size:
        say(f'vocabulary padded from {size:,} to {rows:,} rows, as config.model.vocab_pad_multiple says')
    host_index, num_hosts = rows_of_process(mesh)
    batches = TrainingBatches(
        corpus.prepared('train'),
        config.data,
        vocabulary=vocabulary,
        seed=config.seed,
        rows_multiple=num_data_shards(mesh),
        length_multiple=mesh.shape[SEQUENCE],
        group=config.train.accumulation,
        host_index=host_index,
        num_hosts=num_hosts,
        report=tell,
    )
    evaluate = None
    if corpus.has('validation'):
        evaluation = config.evaluation
        evaluate = make_evaluator(
            config,
            model,
            corpus,
            'validation',
            max_pairs=evaluation.max_pairs,
            bleu=evaluation.bleu,
            mesh=mesh,
            hosts=hosts,
            report=tell,
        )
    description = _describe_run(config, batches)
    before = folder.read_record().get('buckets', description['buckets'])
    if before != description['buckets']:
        tell(
            'the batches are not those that the run had so far, since other rows divide among its devices; it goes on '
            'at the same number of batches, so some pairs of this epoch come twice and some not at all'
        )
    folder.update_record(**description)
    facts = {name: description[name] for name in ('buckets', 'batches_in_epoch')}
    return _Prepared(model, batches, evaluate, facts | {'vocabulary': vocabulary.fingerprint})


def _make_reporter(
    config: Config, folder: RunFolder, begun: float, cache: CompilationCache, *, primary: bool
) -> Reporter:
    """A reporter that also keeps in the run's record where the time of this start went, after those before it."""
    earlier = folder.read_record().get('starts', [])
    return Reporter(
        folder.metrics,
        folder.tensorboard,
        config.logging,
        total_steps=config.train.steps,
        primary=primary,
        keep=lambda split: folder.update_record(starts=[*earlier, split | {'compilation_cache': cache.counts()}]),
        seconds_before=time.monotonic() - begun,
    )


def _teller(hosts: Hosts) -> Callable[[str], None]:
    """Where lines for people go: of several processes, which would all say the same, the first one's alone."""
    return say if hosts.primary else lambda line: None


def _describe_run(config: Config, batches: TrainingBatches) -> dict[str, Any]:
    """What a reader of the run's results needs to know besides its config."""
    return {
        'versions': versions(),
        'devices': [str(device) for device in jax.devices()],
        'attention': _chosen_attention(config, batches),
        'normalization': config.vocabulary.normalization,
        'buckets': [bucket._asdict() for bucket in batches.buckets],
        'batches_in_epoch': batches.batches_in_epoch(),
        'padding': batches.padding,
        'dropped_pairs': batches.dropped,
    }


def _chosen_attention(config: Config, batches: TrainingBatches) -> dict[str, dict[str, Any]]:
    """What each use of attention trains with here, after `auto` has been resolved for each bucket."""
    chosen: dict[str, dict[str, Any]] = {}
    for bucket in batches.buckets:
        for use in models.uses_of_attention(config, (bucket.source_length, bucket.target_length)):
            impls = chosen.setdefault(use.name, {'kind': use.config.kind, 'impl': []})['impl']
            if (impl := choose(use)) not in impls:
                impls.append(impl)
    return {name: one | {'impl': ' or '.join(one['impl'])} for name, one in chosen.items()}


def _describe_attention(chosen: Mapping[str, Mapping[str, Any]]) -> str:
    uses = ', '.join(f'{name} {one["kind"]}/{one["impl"]}' for name, one in chosen.items())
    by_length = ' (by the length of the batch)' if ' or ' in uses else ''
    return f'attention: {uses or "none"}{by_length}'


def _describe_batches(batches: TrainingBatches) -> str:
    shapes = ', '.join(f'{b.rows} x ({b.source_length} + {b.target_length})' for b in batches.buckets)
    return (
        f'batches of rows x (source + target subwords): {shapes}; {batches.batches_in_epoch():,} an epoch, '
        f'{batches.padding:.1%} padding'
    )
