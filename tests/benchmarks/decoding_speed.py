"""Decoding speed beside Hugging Face's `generate` on the same weights, in turns in one run, on CPU.

    python tests/benchmarks/decoding_speed.py MODEL SOURCE REFERENCE [--peer-python PYTHON] [--rounds 3]

MODEL is a MarianMTModel folder with one spm.model; SOURCE and REFERENCE are text, a sentence a line, plain or .gz.
Beam 4 (or --beam), score over L^0.6, at most 64 new subwords of the peer, float32, 2 threads; `--stop heuristic` is the
peer's stop rule.
Compiling is outside the turns and told apart. The peer needs torch, transformers and sentencepiece (extra `interop`).
"""

import argparse
import gzip
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import turns

MAX_NEW = 64


def read(path: str) -> list[str]:
    """Lines, split at LF only."""
    content = Path(path).read_bytes()
    text = gzip.decompress(content) if path.endswith('.gz') else content
    return text.decode().split('\n')[:-1]


def work_ours(options: argparse.Namespace, lines: list[str]) -> None:
    """`Translator` on the imported model, with its own batching."""
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.interop.hf_marian import import_marian

    with tempfile.TemporaryDirectory() as folder:
        import_marian(options.model, Path(folder) / 'run')
        translator = Translator.load(
            Path(folder) / 'run',
            report=lambda text: None,
            method='greedy' if options.beam == 1 else 'beam',
            beam_size=options.beam,
            batch_size=options.batch_size,
            length_penalty='power',
            alpha=0.6,
            stop=options.stop,
        )

    def turn() -> dict:
        best = translator.translate_n_best(lines, 1)
        return {'texts': [one[0].text for one in best], 'tokens': sum(one[0].length for one in best)}

    start = time.perf_counter()
    turn()
    print(
        f'first turn, compiling {translator.num_programs} programs: {time.perf_counter() - start:.1f} s',
        file=sys.stderr,
    )
    turns.work_in_turns(turn)


def work_peer(options: argparse.Namespace, lines: list[str]) -> None:
    """`MarianMTModel.generate` on batches sorted by length."""
    import sentencepiece
    import torch
    from transformers import MarianMTModel

    torch.set_num_threads(2)
    model = MarianMTModel.from_pretrained(options.model).eval()
    pieces = sentencepiece.SentencePieceProcessor(model_file=f'{options.model}/spm.model')
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    ids = [[*one, eos] for one in pieces.encode(lines)]
    order = sorted(range(len(ids)), key=lambda line: -len(ids[line]))
    settings = {'num_beams': options.beam, 'do_sample': False, 'max_new_tokens': MAX_NEW, 'early_stopping': False}
    settings |= {'length_penalty': 0.6 if options.beam > 1 else 1.0, 'bad_words_ids': [[pad]]}

    def turn() -> dict:
        texts, tokens = [''] * len(ids), 0
        for start in range(0, len(ids), options.batch_size):
            batch = order[start : start + options.batch_size]
            width = max(len(ids[line]) for line in batch)
            inputs = torch.tensor([ids[line] + [pad] * (width - len(ids[line])) for line in batch])
            with torch.inference_mode():
                outputs = model.generate(input_ids=inputs, attention_mask=(inputs != pad).long(), **settings)
            for line, output in zip(batch, outputs.tolist(), strict=True):
                found = output[1:]
                found = found[: found.index(eos)] if eos in found else found
                tokens += len(found) + 1
                texts[line] = pieces.decode([token for token in found if token != pad])
        return {'texts': texts, 'tokens': tokens}

    turns.work_in_turns(turn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model')
    parser.add_argument('source')
    parser.add_argument('reference')
    parser.add_argument('--peer-python', default=sys.executable)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--beam', type=int, default=4)
    parser.add_argument('--batch-size', type=int, default=64)
    parser.add_argument('--stop', choices=('exact', 'heuristic'), default='heuristic')
    parser.add_argument('--worker', choices=('ours', 'peer'), help=argparse.SUPPRESS)
    options = parser.parse_args()
    lines = read(options.source)
    if options.worker:
        {'ours': work_ours, 'peer': work_peer}[options.worker](options, lines)
        return
    os.environ['JAX_PLATFORMS'] = 'cpu'

    def start(name: str, python: str, kind: str) -> turns.Worker:
        return turns.Worker(name, [python, __file__, *sys.argv[1:], '--worker', kind])

    ours, peer = start('ours', sys.executable, 'ours'), start('generate', options.peer_python, 'peer')
    turns.in_turns([ours, peer], options.rounds)
    import sacrebleu

    for worker in (ours, peer):
        last = worker.results[-1]
        bleu = sacrebleu.corpus_bleu(last['texts'], [read(options.reference)]).score
        speed = len(lines) / worker.median('seconds')
        memory = max(result['peak_memory_mib'] for result in worker.results)
        figures = f'{speed:.1f} sentences/s, {last["tokens"]:,} tokens, BLEU {bleu:.2f}, peak {memory:,.0f} MiB'
        print(f'{worker.name}: {figures}')
    low, middle, high = turns.ratio(peer, ours, 'seconds')
    print(f'ours / generate in sentences/s: {middle:.2f} (min {low:.2f}, max {high:.2f})')
    for worker in (ours, peer):
        worker.close()


if __name__ == '__main__':
    main()
