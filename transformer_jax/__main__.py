"""The command line: `transformer-jax VERB ...` or `python -m transformer_jax VERB ...`, one function a verb."""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from transformer_jax.commands.parser import make_parser
from transformer_jax.config import Config, ConfigError
from transformer_jax.overlay import config_from_dict, load_config_file, overlay, parse_overrides

DONE, FAILED, BAD_USE = 0, 1, 2
_BY_SIGNAL = 128  # plus the signal's number, as shells have it
_SIGINT, _SIGPIPE = 2, 13
# A full disk or a folder that may not be written needs no traceback.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code."""
    options, rest = make_parser(VERBS).parse_known_args(arguments)
    if not {'', str(Path.cwd())} & set(sys.path):  # an installed command does not look for modules where it is called
        sys.path.append(str(Path.cwd()))
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
    write = command.make_formatter(options.format, n_best=options.n_best, scores=options.scores)
    run = open_checked_run(options.run, options.changes)
    require_task(run.model.task, 'translates')
    check_count(options.n_best, run.config.decoding)
    lines = command.read_input(options.input)
    prefixes = None
    if options.prefix_file is not None:
        prefixes = command.read_prefixes(options.prefix_file, input_name=options.input, num_lines=len(lines))
    translator = command.load_translator(run, options.checkpoint)
    translations = command.translate_lines(translator, lines, prefixes, n_best=options.n_best)
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
    names = ('prompt', 'texts')
    write = lines.make_formatter(options.format, n_best=options.n_best, scores=options.scores, names=names)
    run = open_checked_run(options.run, options.changes)
    require_task(run.model.task, 'generates')
    check_count(options.n_best, run.config.decoding)
    prompts = lines.read_input(options.input)
    generator = command.load_generator(run, options.checkpoint)
    texts = command.generate_lines(generator, prompts, n_best=options.n_best, seed=options.seed)
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


VERBS = (train, evaluate, translate, generate, average, show, check, plan, sweep)

if __name__ == '__main__':
    sys.exit(main())
