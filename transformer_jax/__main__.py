"""The command line: `transformer-jax VERB ...` or `python -m transformer_jax VERB ...`, one function a verb."""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformer_jax import __version__
from transformer_jax.config import Config, ConfigError
from transformer_jax.overlay import config_from_dict, load_config_file, overlay, parse_overrides

DONE, FAILED, BAD_USE = 0, 1, 2
_BY_SIGNAL = 128  # plus the signal's number, as shells have it
_SIGINT, _SIGPIPE = 2, 13
# A full disk or a folder that may not be written needs no traceback.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code."""
    options, rest = _make_parser().parse_known_args(arguments)
    try:
        options.changes = parse_overrides(rest)
        return int(options.run_verb(options) or DONE)
    except KeyboardInterrupt:
        return _BY_SIGNAL + _SIGINT
    except BrokenPipeError:
        # Whoever read the output has gone; Python's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BY_SIGNAL + _SIGPIPE
    except Exception as error:
        code = _judge(error)
        if code is None:
            raise  # with its traceback: a failure that nobody foresaw, exit code 1
        print(f'transformer-jax {options.verb}: {error}', file=sys.stderr)
        return code


def _explain(error: BaseException) -> tuple[str, int]:
    """What a process of several says before it ends, and its exit code: as `main` does for the only one."""
    if isinstance(error, KeyboardInterrupt):
        return 'transformer-jax train: interrupted', _BY_SIGNAL + _SIGINT
    code = _judge(error) if isinstance(error, Exception) else FAILED
    if code is None:
        return ''.join(traceback.format_exception(error)), FAILED
    return f'transformer-jax train: {error}', code


def _judge(error: Exception) -> int | None:
    """The exit code of an error whose message says all that is needed: one that this package raised itself."""
    raised_here = Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(Path(__file__).parent)
    if isinstance(error, ConfigError) or (isinstance(error, ValueError) and raised_here):
        return BAD_USE
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return FAILED
    is_own = type(error).__module__.partition('.')[0] == 'transformer_jax'
    return FAILED if is_own and isinstance(error, RuntimeError) else None


def train(options: argparse.Namespace) -> int:
    """Trains a run, or goes on with it when its folder holds one."""
    from transformer_jax.commands.train import train_run
    from transformer_jax.parallel.cluster import find_job
    from transformer_jax.parallel.hosts import join
    from transformer_jax.training.profiling import parse_steps

    profile_steps = None if options.profile_steps is None else parse_steps(options.profile_steps)
    config = _load_config(options)
    limits = config.execution.hosts
    job = find_job(options.coordinator, options.num_processes, options.process_id, timeout_seconds=limits.start_seconds)
    with join(job, limits, _explain) as hosts:
        signal = train_run(config, options.run, hosts, profile_steps=profile_steps)
    return DONE if signal is None else _BY_SIGNAL + signal


def evaluate(options: argparse.Namespace) -> None:
    """Scores a run on one split."""
    from transformer_jax.commands.evaluate import evaluate_run

    _require_at_least('--examples', options.examples, 0)
    if options.batch_tokens is not None:
        options.changes['evaluation.batch_tokens'] = options.batch_tokens
    evaluate_run(options.run, options.split, options.checkpoint, changes=options.changes, num_examples=options.examples)


def translate(options: argparse.Namespace) -> None:
    """Translates lines of text: one line out for each line in."""
    from transformer_jax.commands import translate as command
    from transformer_jax.commands.validation import open_checked_run
    from transformer_jax.decoding.text_search import require_task
    from transformer_jax.decoding.width import check_count

    _require_at_least('--n-best', options.n_best, 1)
    flags = {'method': options.method, 'beam_size': options.beam_size, 'alpha': options.alpha}
    flags |= {'batch_size': options.batch_size}
    options.changes |= {f'decoding.{name}': value for name, value in flags.items() if value is not None}
    command.check_output(options.output, force=options.force)
    run = open_checked_run(options.run, options.changes)
    require_task(run.model.task, 'translates')
    check_count(options.n_best, run.config.decoding)
    lines = command.read_input(options.input)
    prefixes = None
    if options.prefix_file is not None:
        prefixes = command.read_prefixes(options.prefix_file, input_name=options.input, num_lines=len(lines))
    translator = command.load_translator(run, options.checkpoint)
    translations = command.translate_lines(translator, lines, prefixes, n_best=options.n_best)
    write = command.make_formatter(options.format, n_best=options.n_best, scores=options.scores)
    with command.open_output(options.output, force=options.force) as output:
        for number, (line, found) in enumerate(zip(lines, translations, strict=True), start=1):
            output.write(f'{write(number, line, found)}\n'.encode())


def generate(options: argparse.Namespace) -> None:
    """Continues texts with a language model: one text out for each prompt in."""
    from transformer_jax.commands import generate as command
    from transformer_jax.commands import translate as lines
    from transformer_jax.commands.validation import open_checked_run
    from transformer_jax.decoding.text_search import require_task
    from transformer_jax.decoding.width import check_count

    _require_at_least('--n-best', options.n_best, 1)
    _require_at_least('--seed', options.seed, 0)
    names = ('method', 'beam_size', 'temperature', 'top_k', 'top_p', 'max_extra_length', 'batch_size')
    flags = {name: getattr(options, name) for name in names}
    options.changes |= {f'decoding.{name}': value for name, value in flags.items() if value is not None}
    lines.check_output(options.output, force=options.force)
    run = open_checked_run(options.run, options.changes)
    require_task(run.model.task, 'generates')
    check_count(options.n_best, run.config.decoding)
    prompts = lines.read_input(options.input)
    generator = command.load_generator(run, options.checkpoint)
    texts = command.generate_lines(generator, prompts, n_best=options.n_best, seed=options.seed)
    names = ('prompt', 'texts')
    write = lines.make_formatter(options.format, n_best=options.n_best, scores=options.scores, names=names)
    with lines.open_output(options.output, force=options.force) as output:
        for number, (prompt, found) in enumerate(zip(prompts, texts, strict=True), start=1):
            output.write(f'{write(number, prompt, found)}\n'.encode())


def average(options: argparse.Namespace) -> None:
    """Averages the parameters of several checkpoints of a run."""
    from transformer_jax.checkpoints.average import average_run

    if options.changes:
        raise ConfigError(f'average takes no changes of the config: --config.{next(iter(options.changes))}')
    steps = None if options.steps is None else _parse_whole_numbers('--steps', options.steps)
    average_run(options.run, last=options.last, steps=steps, out=options.out)
    print(f'the average is in {options.out}: evaluate and translate take it as --checkpoint {options.out}')


def show(options: argparse.Namespace) -> None:
    """Shows what a config means, without training."""
    from transformer_jax.commands.show import describe

    if options.config is None and options.run is None:
        raise ConfigError('show needs --config=FILE or --run DIR')
    for line in describe(_load_config(options), options.run):
        print(line)


def check(options: argparse.Namespace) -> int:
    """Checks a config's attention and model against their equations."""
    # Before JAX starts: eight simulated devices where there is no other, to compare one device with several.
    os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')
    from transformer_jax.commands.check import check_run

    if options.config is None and options.run is None:
        raise ConfigError('check needs --config=FILE or --run DIR')
    return DONE if check_run(_load_config(options)) else FAILED


def plan(options: argparse.Namespace) -> None:
    """Compiles a config's program for devices that need not be here and says what it takes."""
    from transformer_jax.parallel.targets import prepare_environment

    if options.config is None and options.run is None:
        raise ConfigError('plan needs --config=FILE or --run DIR')
    if (options.topology is None) == (options.devices is None):
        raise ConfigError('plan needs one of --topology (a TPU slice, as v5e:4x4) and --devices (cpu:8, gpu:1)')
    for flag, value in (('--batch', options.batch), ('--length', options.length)):
        if value is not None:
            _require_at_least(flag, value, 1)
    prepare_environment(os.environ, options.topology, options.devices)  # before JAX starts
    from transformer_jax.commands.plan import print_plan

    print_plan(
        _load_config(options),
        topology=options.topology,
        devices=options.devices,
        mesh=options.mesh,
        batch=options.batch,
        length=options.length,
        decode=options.decode,
        run=options.run,
        search=options.search,
        as_json=options.json,
    )


def sweep(options: argparse.Namespace) -> int:
    """Trains and compares the points of a sweep."""
    from transformer_jax.commands.sweep import finish, open_sweep

    _require_at_least('--jobs', options.jobs, 1)
    run = open_sweep(
        options.out,
        options.config,
        options.changes,
        seeds=None if options.seeds is None else _parse_whole_numbers('--seeds', options.seeds),
        runs=options.runs,
        split=options.split,
        baseline=options.baseline,
    )
    trials = run.sweep.select(None if options.points is None else options.points.split(','))
    run.start(may_write=not options.collect, must_exist=options.collect)
    signal = None if options.collect else run.run(trials, at_once=options.jobs)
    succeeded = finish(run, trials)
    if signal is not None:
        return _BY_SIGNAL + signal
    return DONE if succeeded else FAILED


def _load_config(options: argparse.Namespace) -> Config:
    """The config file's config, or else the one that the run folder holds, with the changes of the command line."""
    if options.config is not None:
        return overlay(load_config_file(options.config), options.changes)
    from transformer_jax.checkpoints.run_folder import RunFolder

    return overlay(config_from_dict(RunFolder.open(options.run).read_config()), options.changes)


def _require_at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f'{flag} is {value}; it must be at least {least}')


def _parse_whole_numbers(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(',')]
    except ValueError:
        raise ConfigError(f'{flag} is {text!r}; it must be whole numbers with commas between') from None


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        'transformer-jax',
        description='Train, score and use Transformers of "Attention Is All You Need".',
        epilog=f'"transformer-jax VERB --help" tells more.\n\n{_EXIT_CODES}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--version', action='version', version=f'%(prog)s {__version__}')
    verbs = parser.add_subparsers(dest='verb', required=True, metavar='VERB')
    for add in (
        _add_train,
        _add_evaluate,
        _add_translate,
        _add_generate,
        _add_average,
        _add_show,
        _add_check,
        _add_plan,
        _add_sweep,
    ):
        add(verbs)
    return parser


def _add_verb(verbs: Any, run_verb: Callable, description: str, config: str = '') -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        run_verb.__name__,
        help=(run_verb.__doc__ or '').rstrip('.'),
        description=description,
        epilog=(f'config:\n{config}\n' if config else '') + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # so that `--config.model.d_model=256` can't be taken for another option
    )
    verb.set_defaults(run_verb=run_verb)
    if run_verb is not sweep:  # which has a folder of many runs
        required = run_verb not in (show, check, plan)
        verb.add_argument('--run', metavar='DIR', required=required, help='the run folder, on a disk or as gs://...')
    return verb


def _add_train(verbs: Any) -> None:
    verb = _add_verb(
        verbs,
        train,
        'Trains a run. The folder takes everything that the run writes. The same command again goes on where the\n'
        'run stopped; there another config is refused, but for fields that change no result (steps, logging, ...).',
        _CONFIG_FILE + _CONFIG_FIELD,
    )
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


def _add_evaluate(verbs: Any) -> None:
    verb = _add_verb(
        verbs,
        evaluate,
        'Scores a run on a split: likelihood, perplexity, sacreBLEU, chrF, for German the split BLEU of the paper,\n'
        'for the built-in task exact matches by phenomenon. Every pair is scored once, on its raw reference.',
        _CONFIG_FIELD,
    )
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


def _add_translate(verbs: Any) -> None:
    verb = _add_verb(
        verbs,
        translate,
        'Translates text: one line out for each line in, in the same order. A line ends at LF; blank lines stay\n'
        'blank. How many lines, cut sources and cut translations there were goes to standard error.',
        _CONFIG_FIELD,
    )
    _add_checkpoint(verb)
    add = verb.add_argument
    add('--input', default='-', metavar='FILE', help='UTF-8 text, plain or .gz; default: standard input')
    add('--output', default='-', metavar='FILE', help='appears when all is done; default: standard output')
    add('--force', action='store_true', help='replace the output file if it exists')
    add('--format', default='text', choices=('text', 'jsonl'), help='jsonl: one object a line in, with all figures')
    add('--scores', action='store_true', help='text: SCORE and a tab before each translation')
    add('--n-best', type=int, default=1, metavar='N', help='text: N lines for each, NUMBER and a tab before them')
    add('--prefix-file', metavar='FILE', help='what each translation must start with, line by line')
    add('--method', choices=('beam', 'greedy', 'sampling'), help='default: as the run is configured')
    add('--beam-size', metavar='N', help='default: as the run is configured; 4 in the paper')
    add('--alpha', metavar='A', help='length penalty; default: as the run is configured; 0.6 in the paper')
    add('--batch-size', metavar='N', help='sentences at a time; default: as the run is configured')


def _add_generate(verbs: Any) -> None:
    verb = _add_verb(
        verbs,
        generate,
        'Continues texts with a language model: one text out for each prompt in, in the same order, the prompt\n'
        'included. A line ends at LF; a blank line asks for a text from its beginning.',
        _CONFIG_FIELD,
    )
    _add_checkpoint(verb)
    add = verb.add_argument
    add('--input', default='-', metavar='FILE', help='prompts, UTF-8, plain or .gz; default: standard input')
    add('--output', default='-', metavar='FILE', help='appears when all is done; default: standard output')
    add('--force', action='store_true', help='replace the output file if it exists')
    add('--format', default='text', choices=('text', 'jsonl'), help='jsonl: one object a line in, with all figures')
    add('--scores', action='store_true', help='text: SCORE and a tab before each text')
    add('--n-best', type=int, default=1, metavar='N', help='text: N lines for each, NUMBER and a tab before them')
    add('--method', choices=('beam', 'greedy', 'sampling'), help='default: as the run is configured')
    add('--beam-size', metavar='N', help='default: as the run is configured')
    add('--temperature', metavar='T', help='of sampling; default: as the run is configured')
    add('--top-k', metavar='K', help='of sampling: among the K most probable; default: as the run is configured')
    add('--top-p', metavar='P', help='of sampling: among those that hold P of the probability; default: likewise')
    add('--seed', type=int, default=0, metavar='N', help='of sampling; default: 0')
    add('--max-extra-length', metavar='N', help='subwords a text may be longer than its prompt; default: likewise')
    add('--batch-size', metavar='N', help='prompts at a time; default: as the run is configured')


def _add_average(verbs: Any) -> None:
    verb = _add_verb(
        verbs,
        average,
        'Averages the parameters of several checkpoints into one that evaluate and translate take. The paper\n'
        '(section 6.1) averages the last 5 of the base model and the last 20 of the big one.',
    )
    which = verb.add_mutually_exclusive_group(required=True)
    which.add_argument('--last', type=int, metavar='K', help='the last K that the run keeps')
    which.add_argument('--steps', metavar='A,B,...', help='those of these steps')
    verb.add_argument('--out', required=True, metavar='DIR', help='where the average goes; must not exist')


def _add_show(verbs: Any) -> None:
    verb = _add_verb(
        verbs,
        show,
        'Prints the whole config, the parameters by name and shape, their number, the mesh, and, once the data of\n'
        'the run are prepared, its buckets and the steps of an epoch. Trains nothing and writes nothing.',
        _CONFIG_FILE + _CONFIG_FIELD,
    )
    verb.add_argument('--config', metavar='FILE[:ARGS]', help='the config; default: the one of the run')


def _add_check(verbs: Any) -> None:
    verb = _add_verb(
        verbs,
        check,
        'Holds what a config describes against its equations, sizes reduced, in float32: values and gradients of each\n'
        'attention in float64, causality, padding, packing, cached decoding, one device against several. Prints the\n'
        'worst error of each check; the exit code is 1 if one is too large. Trains nothing and writes nothing.',
        _CONFIG_FILE + _CONFIG_FIELD,
    )
    verb.add_argument('--config', metavar='FILE[:ARGS]', help='the config; default: the one of the run')


def _add_sweep(verbs: Any) -> None:
    verb = _add_verb(
        verbs,
        sweep,
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


def _add_plan(verbs: Any) -> None:
    verb = _add_verb(
        verbs,
        plan,
        'Compiles the real training update, or the decode step, for devices that need not be here, and prints what\n'
        'it takes of each: parameters, optimizer state, activations, peak memory, FLOPs, bytes, collectives,\n'
        'estimated cycles, step time, model FLOP utilisation, compile time. Draws no parameters, writes nothing.',
        _CONFIG_FILE + _CONFIG_FIELD,
    )
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


if __name__ == '__main__':
    sys.exit(main())
