"""Training speed beside Hugging Face's MarianMTModel on PyTorch, in turns in one run, on CPU.

    python tests/benchmarks/training_speed.py FOLDER --work DIR [--peer-python PYTHON] [--rounds 5] [--steps 12]

FOLDER holds Multi30k task 1 (train.en.gz, train.de.gz); DIR takes what is prepared. The peer needs torch, transformers
and numpy (extra `interop`) in PYTHON's environment, which may be another one. Shape: 3+3 layers, d_model 256, 4 heads,
d_ff 1024, joint BPE of 8,000; about 4,096 real target tokens an update; dropout 0.1; Adam; float32; 2 threads.
Four systems: ours on its own buckets, on its own packed rows and on the peer's batches, and the peer.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import turns

PEER_LENGTHS = (12, 16, 20, 24, 32, 56)
TARGET_TOKENS = 4096  # real ones in a batch of the peer, about
OUR_BATCH_TOKENS = {'buckets': 4700, 'packing': 4352}  # slots, so that about as many of them are real


def prepare(folder: Path, work: Path, steps: int) -> None:
    """Writes `steps` random batches of an epoch of each batching: our buckets, our packed rows, the peer's."""
    from etils import epath

    from transformer_jax.config import Config
    from transformer_jax.data.corpus import open_corpus
    from transformer_jax.data.pipeline import TrainingBatches, batch_from_ids
    from transformer_jax.overlay import overlay
    from transformer_jax.recipes import apply

    sides = (('source', 'en'), ('target', 'de'))
    changes = {f'data.text_files.train_{side}': f'{folder}/train.{code}.gz' for side, code in sides}
    changes |= {'data.source': 'text_files', 'vocabulary.size': 8000, 'data.max_length': 64}
    config = overlay(apply(Config(), size='mini'), changes)
    corpus = open_corpus(config, epath.Path(work / 'vocabulary'), epath.Path(work / 'data'))
    prepared, vocabulary = corpus.prepared('train'), corpus.vocabulary
    for name, batch_tokens in OUR_BATCH_TOKENS.items():
        data = overlay(config, {'data.batching': name, 'data.batch_tokens': batch_tokens}).data
        batches = TrainingBatches(prepared, data, vocabulary=vocabulary, seed=0)
        print(f'{name}: {batches.padding:.1%} padding, {batches.batches_in_epoch()} batches an epoch')
        save(work / f'{name}.npz', [batches.batch(index).batch for index in range(steps)])

    rng = np.random.default_rng(0)
    longest = np.maximum(prepared.source_lengths, prepared.target_lengths)
    theirs = []
    for low, high in zip((0, *PEER_LENGTHS), PEER_LENGTHS, strict=False):
        pairs = rng.permutation(np.flatnonzero((longest > low) & (longest <= high)))
        rows = max(8, round(TARGET_TOKENS / prepared.target_lengths[pairs].mean() / 8) * 8)
        shape = {'rows': rows, 'source_length': high, 'target_length': high}
        for start in range(0, len(pairs) - rows + 1, rows):
            ids = [
                [side(pair) for pair in pairs[start : start + rows]]
                for side in (prepared.source_ids, prepared.target_ids)
            ]
            theirs.append(batch_from_ids(*ids, vocabulary=vocabulary, **shape))
    order = rng.permutation(len(theirs))[:steps]
    save(work / 'peer.npz', [theirs[index] for index in order])


def save(path: Path, batches: list) -> None:
    """All arrays of each batch."""
    np.savez(
        path, **{f'{field}{i}': array for i, batch in enumerate(batches) for field, array in batch._asdict().items()}
    )


def load(path: Path) -> list[dict[str, np.ndarray]]:
    """The arrays of each batch, by name."""
    fields = ('inputs', 'targets', 'input_segment_ids', 'target_segment_ids', 'input_positions', 'target_positions')
    with np.load(path) as arrays:
        return [{field: arrays[f'{field}{i}'] for field in fields} for i in range(len(arrays.files) // len(fields))]


def work_ours(batches: list[dict[str, np.ndarray]]) -> None:
    """Our jitted, donated step, as the training loop runs it."""
    import jax

    from transformer_jax import models
    from transformer_jax.config import Config
    from transformer_jax.data.batch import Batch
    from transformer_jax.recipes import apply
    from transformer_jax.training.optimizer import make_optimizer
    from transformer_jax.training.schedule import make_schedule
    from transformer_jax.training.state import make_state
    from transformer_jax.training.step import make_train_step

    config = apply(Config(), size='mini')
    model = models.build(config.model, vocab_size=8000, start_id=3)
    schedule = make_schedule(config.optimizer.schedule, config.model.d_model, 1000)
    optimizer = make_optimizer(config.optimizer, schedule)
    step = jax.jit(make_train_step(model, optimizer, schedule, config.train, seed=0), donate_argnums=0)
    state = jax.jit(lambda: make_state(model.init(jax.random.key(0)), optimizer, with_average=False))()

    ready = [Batch(**batch) for batch in batches]

    def turn() -> dict:
        nonlocal state
        for batch in ready:
            state, metrics = step(state, (batch,))
        return {'loss': float(metrics.loss_sum / metrics.target_tokens), 'tokens': _count(batches)}

    turn()  # compiles every shape
    turns.work_in_turns(turn)


def work_peer(batches: list[dict[str, np.ndarray]]) -> None:
    """MarianMTModel with PyTorch's fused Adam."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    torch.set_num_threads(2)
    torch.manual_seed(0)
    width = {'d_model': 256, 'encoder_layers': 3, 'decoder_layers': 3, 'encoder_ffn_dim': 1024, 'decoder_ffn_dim': 1024}
    heads = {'encoder_attention_heads': 4, 'decoder_attention_heads': 4}
    ids = {
        'pad_token_id': 0,
        'eos_token_id': 1,
        'bos_token_id': 3,
        'decoder_start_token_id': 0,
        'forced_eos_token_id': None,
    }
    config = MarianConfig(
        vocab_size=8000, activation_function='relu', dropout=0.1, scale_embedding=True, max_position_embeddings=256,
        share_encoder_decoder_embeddings=True, tie_word_embeddings=True, init_std=0.03, **width, **heads, **ids,
    )  # fmt: skip
    model = MarianMTModel(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98), fused=True)

    def turn() -> dict:
        for batch in batches:
            inputs, targets = (torch.from_numpy(batch[side]).long() for side in ('inputs', 'targets'))
            shifted = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], 1)
            logits = model(
                input_ids=inputs, attention_mask=inputs != 0, decoder_input_ids=shifted, use_cache=False
            ).logits
            loss = torch.nn.functional.cross_entropy(
                logits.view(-1, 8000), targets.view(-1), ignore_index=0, label_smoothing=0.1
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return {'loss': loss.item(), 'tokens': _count(batches)}

    turn()
    turns.work_in_turns(turn)


def _count(batches: list[dict[str, np.ndarray]]) -> int:
    return int(sum((batch['target_segment_ids'] > 0).sum() for batch in batches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path)
    parser.add_argument('--work', type=Path, required=True)
    parser.add_argument('--peer-python', default=sys.executable)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--steps', type=int, default=12)
    parser.add_argument('--worker', choices=('ours', 'peer'), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        {'ours': work_ours, 'peer': work_peer}[options.worker](load(options.folder))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ['JAX_PLATFORMS'] = 'cpu'
    prepare(options.folder, options.work, options.steps)

    def start(name: str, python: str, kind: str, batches: str) -> turns.Worker:
        command = [python, __file__, str(options.work / batches), '--work', str(options.work), '--worker', kind]
        return turns.Worker(name, command)

    ours = [start(f'ours, {name}', sys.executable, 'ours', f'{name}.npz') for name in (*OUR_BATCH_TOKENS, 'peer')]
    peer = start('MarianMTModel', options.peer_python, 'peer', 'peer.npz')
    workers = [*ours, peer]
    turns.in_turns(workers, options.rounds)
    for worker in workers:
        for result in worker.results:
            result['tokens_per_second'] = result['tokens'] / result['seconds']
        memory = max(result['peak_memory_mib'] for result in worker.results)
        print(f'{worker.name}: {worker.median("tokens_per_second"):,.0f} real target tokens/s, peak {memory:,.0f} MiB')
    for worker in ours:
        low, middle, high = turns.ratio(worker, peer, 'tokens_per_second')
        print(f'{worker.name} / MarianMTModel: {middle:.2f} (min {low:.2f}, max {high:.2f})')
    for worker in workers:
        worker.close()


if __name__ == '__main__':
    main()
