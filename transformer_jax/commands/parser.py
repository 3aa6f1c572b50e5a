"""The flags of each verb of the command line, and what `--help` says of them."""

import argparse
from collections.abc import Callable, Sequence

from transformer_jax import __version__

_CONFIG_FILE = """\
  --config=FILE[:NAME=VALUE,...]  a config file, with its own arguments after a colon
"""
_CONFIG_FIELD = """\
  --config.GROUP.FIELD=VALUE      changes one field of the config; "none" turns an optional one off;
                                  "transformer-jax show" prints all of them
"""
_EXIT_CODES = """\
exit codes:
  0      done
  2      bad use or bad input; the message says what
  1      failure
  128+n  stopped by signal n: 130 is Ctrl-C, 143 is SIGTERM (a training run saves before it stops)
"""


def make_parser(verbs: Sequence[Callable]) -> argparse.ArgumentParser:
    """The parser of all verbs. The functions of `verbs` run them, and say in a line what they do."""
    parser = argparse.ArgumentParser(
        'transformer-jax',
        description='Train, score and use Transformers of "Attention Is All You Need".',
        epilog=f'"transformer-jax VERB --help" tells more.\n\n{_EXIT_CODES}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--version', action='version', version=f'%(prog)s {__version__}')
    add_verb = parser.add_subparsers(dest='verb', required=True, metavar='VERB').add_parser
    add_arguments = {
        'train': _add_train,
        'evaluate': _add_evaluate,
        'translate': _add_translate,
        'generate': _add_generate,
        'average': _add_average,
        'show': _add_show,
        'check': _add_check,
        'plan': _add_plan,
        'sweep': _add_sweep,
    }
    for run_verb in verbs:
        name = run_verb.__name__
        verb = add_verb(
            name,
            help=(run_verb.__doc__ or '').rstrip('.'),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # so that `--config.model.d_model=256` can't be taken for another option
        )
        verb.set_defaults(run_verb=run_verb)
        add_arguments[name](verb)
    return parser


def _describe(verb: argparse.ArgumentParser, description: str, config: str = '') -> None:
    verb.description = description
    verb.epilog = (f'config:\n{config}\n' if config else '') + _EXIT_CODES


def _add_run(verb: argparse.ArgumentParser, *, required: bool = True) -> None:
    verb.add_argument('--run', metavar='DIR', required=required, help='the run folder, on a disk or as gs://...')


def _add_train(verb: argparse.ArgumentParser) -> None:
    _describe(
        verb,
        'Trains a run. The folder takes everything that the run writes. The same command again goes on where the\n'
        'run stopped; there another config is refused, but for fields that change no result (steps, logging, ...).',
        _CONFIG_FILE + _CONFIG_FIELD,
    )
    _add_run(verb)
    add = verb.add_argument
    add('--config', metavar='FILE[:ARGS]', help='the config; may be left out to go on with a run')
    add('--profile-steps', metavar='A:B', help='trace updates A to B for the profile page of TensorBoard')
    several = verb.add_argument_group(
        'several processes',
        'Found by themselves on Cloud TPU, under srun and in indexed Kubernetes Jobs; elsewhere give all three. The\n'
        'run folder must be on a disk that all share, or gs://.',
    )
    add = several.add_argument
    add('--coordinator', metavar='HOST:PORT', help='where process 0 is; or JAX_COORDINATOR_ADDRESS')
    add('--num-processes', type=int, metavar='N', help='or JAX_NUM_PROCESSES; 1: this process alone, whatever is found')
    add('--process-id', type=int, metavar='I', help='0 to N-1; or JAX_PROCESS_ID')


def _add_evaluate(verb: argparse.ArgumentParser) -> None:
    _describe(
        verb,
        'Scores a run on a split: likelihood, perplexity, sacreBLEU, chrF, for German the split BLEU of the paper,\n'
        'for the built-in task exact matches by phenomenon. Every pair is scored once, on its raw reference.',
        _CONFIG_FIELD,
    )
    _add_run(verb)
    verb.add_argument(
        '--split',
        default='test',
        metavar='NAME',
        help='train, validation or test; of the built-in task also long (beyond the lengths of training) and\n'
        'combinations (of words kept apart in training); default: test',
    )
    _add_checkpoint(verb)
    verb.add_argument('--examples', type=int, default=0, metavar='N', help='also print the first N translations')
    verb.add_argument('--batch-tokens', metavar='N', help='source slots a batch; default: as the run is configured')


def _add_translate(verb: argparse.ArgumentParser) -> None:
    _describe(
        verb,
        'Translates text: one line out for each line in, in the same order. A line ends at LF; blank lines stay\n'
        'blank. How many lines, cut sources and cut translations there were goes to standard error.',
        _CONFIG_FIELD,
    )
    _add_run(verb)
    _add_checkpoint(verb)
    _add_lines(verb, lines='UTF-8 text', each='translation')
    add = verb.add_argument
    add('--prefix-file', metavar='FILE', help='what each translation must start with, line by line')
    add('--method', choices=('beam', 'greedy', 'sampling'), help='default: as the run is configured')
    add('--beam-size', metavar='N', help='default: as the run is configured; 4 in the paper')
    add('--alpha', metavar='A', help='length penalty; default: as the run is configured; 0.6 in the paper')
    add('--batch-size', metavar='N', help='sentences at a time; default: as the run is configured')


def _add_generate(verb: argparse.ArgumentParser) -> None:
    _describe(
        verb,
        'Continues texts with a language model: one text out for each prompt in, in the same order, the prompt\n'
        'included. A line ends at LF; a blank line asks for a text from its beginning.',
        _CONFIG_FIELD,
    )
    _add_run(verb)
    _add_checkpoint(verb)
    _add_lines(verb, lines='prompts, UTF-8', each='text')
    add = verb.add_argument
    add('--method', choices=('beam', 'greedy', 'sampling'), help='default: as the run is configured')
    add('--beam-size', metavar='N', help='default: as the run is configured')
    add('--temperature', metavar='T', help='of sampling; default: as the run is configured')
    add('--top-k', metavar='K', help='of sampling: among the K most probable; default: as the run is configured')
    add('--top-p', metavar='P', help='of sampling: among those that hold P of the probability; default: likewise')
    add('--seed', type=int, default=0, metavar='N', help='of sampling; default: 0')
    add('--max-extra-length', metavar='N', help='subwords a text may be longer than its prompt; default: likewise')
    add('--batch-size', metavar='N', help='prompts at a time; default: as the run is configured')


def _add_average(verb: argparse.ArgumentParser) -> None:
    _describe(
        verb,
        'Averages the parameters of several checkpoints into one that evaluate and translate take. The paper\n'
        '(section 6.1) averages the last 5 of the base model and the last 20 of the big one.',
    )
    _add_run(verb)
    which = verb.add_mutually_exclusive_group(required=True)
    which.add_argument('--last', type=int, metavar='K', help='the last K that the run keeps')
    which.add_argument('--steps', metavar='A,B,...', help='those of these steps')
    verb.add_argument('--out', required=True, metavar='DIR', help='where the average goes; must not exist')


def _add_show(verb: argparse.ArgumentParser) -> None:
    _describe(
        verb,
        'Prints the whole config, the parameters by name and shape, their number, the mesh, and, once the data of\n'
        'the run are prepared, its buckets and the steps of an epoch. Trains nothing and writes nothing.',
        _CONFIG_FILE + _CONFIG_FIELD,
    )
    _add_run(verb, required=False)
    verb.add_argument('--config', metavar='FILE[:ARGS]', help='the config; default: the one of the run')


def _add_check(verb: argparse.ArgumentParser) -> None:
    _describe(
        verb,
        'Holds what a config describes against its equations, sizes reduced, in float32: values and gradients of each\n'
        'attention in float64, causality, padding, packing, cached decoding, one device against several. Prints the\n'
        'worst error of each check; the exit code is 1 if one is too large. Trains nothing and writes nothing.',
        _CONFIG_FILE + _CONFIG_FIELD,
    )
    _add_run(verb, required=False)
    verb.add_argument('--config', metavar='FILE[:ARGS]', help='the config; default: the one of the run')


def _add_sweep(verb: argparse.ArgumentParser) -> None:
    _describe(
        verb,
        'Trains and scores each point of a sweep in processes of their own, DIR/POINT/seed-N being the run folders,\n'
        'and writes DIR/results.csv, results.md and plots. A point that fails is a row of the table; the exit code is\n'
        'then 1. The same command again does what is missing: failed points anew, cut ones from where they stopped.',
        '  --config=FILE                   the sweep: BASE, a config file, and points(), see configs/sweeps\n'
        '  --config.GROUP.FIELD=VALUE      changes one field of the config for all points\n',
    )
    add = verb.add_argument
    add('--out', required=True, metavar='DIR', help='the folder of the sweep, on a disk')
    add('--config', metavar='FILE', help='the sweep; may be left out to go on with the one in DIR as it was begun')
    add('--points', metavar='NAME,...', help='trains only these: names of points or of their folders, or NAME/seed-N')
    add('--seeds', metavar='N,...', help='trains each point with each seed; default: the seed of its config')
    add('--jobs', type=int, default=1, metavar='N', help='trainings at once; default: 1')
    add('--baseline', metavar='NAME', help='the point that the others are compared with; default: the first')
    add('--split', metavar='NAME', help='what is scored, one that the data have; default: test')
    add('--runs', metavar='DIR', help='where the run folders go, as gs://...; default: into the folder of the sweep')
    add('--collect', action='store_true', help='trains nothing: reads what there is, and writes the table')


def _add_plan(verb: argparse.ArgumentParser) -> None:
    _describe(
        verb,
        'Compiles the real training update, or the decode step, for devices that need not be here, and prints what\n'
        'it takes of each: parameters, optimizer state, activations, peak memory, FLOPs, bytes, collectives,\n'
        'estimated cycles, step time, model FLOP utilisation, compile time. Draws no parameters, writes nothing.',
        _CONFIG_FILE + _CONFIG_FIELD,
    )
    _add_run(verb, required=False)
    add = verb.add_argument
    add('--config', metavar='FILE[:ARGS]', help='the config; default: the one of the run')
    add('--topology', metavar='NAME', help='a TPU slice, as v5e:4x4 or v5p:4x4x4; needs the extra tpu, and no TPU')
    add('--devices', metavar='cpu:N|gpu:N', help='devices of this machine instead; of a CPU, N simulated ones')
    add('--mesh', metavar='AXIS=N,...', help='as data=8,model=2; default: of the config. A smaller one uses the first')
    add('--batch', type=int, metavar='N', help='rows of the global batch; default: as the config has it')
    add('--length', type=int, metavar='N', help='subwords of a row, each side; default: as the config has it')
    add('--decode', action='store_true', help='the decode step in place of the update')
    add('--search', action='store_true', help='also tries mesh splits, batches and remat, and prints a table of them')
    add('--json', action='store_true', help='prints one JSON object; bytes, FLOPs and collectives are of one device')


def _add_checkpoint(verb: argparse.ArgumentParser) -> None:
    help_text = 'best, latest, a step, or a folder that "average" wrote; default: best, or latest if none has a score'
    verb.add_argument('--checkpoint', metavar='WHICH', help=help_text)


def _add_lines(verb: argparse.ArgumentParser, *, lines: str, each: str) -> None:
    add = verb.add_argument
    add('--input', default='-', metavar='FILE', help=f'{lines}, plain or .gz; default: standard input')
    add('--output', default='-', metavar='FILE', help='appears when all is done; default: standard output')
    add('--force', action='store_true', help='replace the output file if it exists')
    add('--format', default='text', choices=('text', 'jsonl'), help='jsonl: one object a line in, with all figures')
    add('--scores', action='store_true', help=f'text: SCORE and a tab before each {each}')
    add('--n-best', type=int, default=1, metavar='N', help='text: N lines for each, NUMBER and a tab before them')
