"""The command line: every verb on one small run, exit codes, and output that appears whole or not at all."""

import errno
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import transformer_jax.__main__ as command_line
from transformer_jax.checking import Finding
from transformer_jax.checkpoints.digests import CheckpointError
from transformer_jax.commands import check as check_command
from transformer_jax.commands import evaluate as evaluate_command
from transformer_jax.commands import translate as translate_command
from transformer_jax.config import ConfigError
from transformer_jax.decoding.translator import Translation, Translator
from transformer_jax.evaluation.evaluator import Evaluator, Result

ROOT = Path(__file__).parent.parent
SMALL = [
    f'--config={ROOT / "configs" / "copy_tiny.py"}',
    '--config.model.num_encoder_layers=1',
    '--config.model.num_decoder_layers=1',
    '--config.model.d_model=8',
    '--config.model.d_ff=12',
    '--config.model.attention.num_heads=2',
    '--config.model.attention.head_dim=4',
    '--config.data.num_buckets=1',
    '--config.data.copying.num_train=400',
    '--config.data.copying.num_validation=9',
    '--config.data.copying.num_test=11',
    '--config.vocabulary.size=44',
    '--config.evaluation.bleu=false',
    '--config.evaluation.score=loss',
    '--config.evaluation.every_steps=2',
    '--config.checkpoint.every_steps=2',
    '--config.train.steps=4',
    '--config.logging.tensorboard=false',
]


def run(*arguments):
    return command_line.main([str(argument) for argument in arguments])


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'small'
    assert run('train', '--run', folder, *SMALL) == 0
    return folder


@pytest.fixture
def standard_input(monkeypatch):
    def give(content):
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(content)))

    return give


def test_the_same_command_again_trains_no_further(trained, capsys):
    before = sorted(path.name for path in (trained / 'checkpoints').iterdir())
    assert run('train', '--run', trained, *SMALL) == 0
    assert sorted(path.name for path in (trained / 'checkpoints').iterdir()) == before
    assert 'compiled the update' not in capsys.readouterr().err


def test_a_run_goes_on_without_its_config_file_and_refuses_another_config(trained, capsys):
    assert run('train', '--run', trained) == 0
    assert run('train', '--run', trained, *SMALL, '--config.train.label_smoothing=0.2') == 2
    message = capsys.readouterr().err
    assert 'config.train.label_smoothing: 0.1 in the run, 0.2 now' in message
    assert 'Traceback' not in message


def test_evaluate_scores_every_pair_and_shows_examples(trained, capsys):
    assert run('evaluate', '--run', trained, '--examples', 3, '--config.decoding.method=greedy') == 0
    captured = capsys.readouterr().out
    assert 'test: 11 pairs' in captured
    assert 'exact match: ' in captured
    assert captured.count('reference: ') == 3
    first = sorted((trained / 'evaluations').iterdir())
    assert run('evaluate', '--run', trained, '--config.decoding.method=greedy') == 0
    assert len(list((trained / 'evaluations').iterdir())) == len(first) + 1  # nothing was replaced
    assert len((first[0] / 'test.hypotheses.txt').read_bytes().decode().split('\n')) == 12


class QuickEvaluator(Evaluator):
    """Gives figures without looking at the model."""

    def __call__(self, params):
        self.hypotheses = ['x y'] * len(self._pairs)
        return Result('test', len(self._pairs), 40, 30, nll=41.0)


@pytest.fixture
def evaluated_at_once(monkeypatch):
    def make(config, model, corpus, split):
        return QuickEvaluator(model, corpus.prepared(split), corpus.pairs(split), corpus.vocabulary, batch_tokens=64)

    monkeypatch.setattr(evaluate_command, 'make_evaluator', make)


@pytest.mark.usefixtures('evaluated_at_once')
def test_scores_go_elsewhere_where_a_run_may_not_be_written(trained, capsys, tmp_path, monkeypatch):
    folder = tmp_path / 'run'
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns('evaluations'))
    (folder / 'evaluations').write_text('in the way')  # where permissions do not bind root
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    assert run('evaluate', '--run', folder, '--examples', 3) == 0
    captured = capsys.readouterr()
    assert 'test: 11 pairs' in captured.out
    assert captured.out.count('translation: x y\nreference: ') == 3
    (kept,) = tmp_path.glob('evaluation_*')
    assert 'evaluations/test_step_4 could not be written: Not a directory\nthe scores, the ' in captured.err
    assert captured.err.endswith(f' are in {kept}\n')
    assert (kept / 'test.hypotheses.txt').read_text() == 'x y\n' * 11


@pytest.mark.usefixtures('evaluated_at_once')
def test_scores_are_shown_where_nothing_can_be_written(trained, capsys, tmp_path, files_no_longer_than):
    folder = tmp_path / 'run'
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns('evaluations'))
    assert run('evaluate', '--run', folder) == 0
    before = list((folder / 'evaluations').iterdir())
    capsys.readouterr()
    with files_no_longer_than(150):
        assert run('evaluate', '--run', folder) == 1
    captured = capsys.readouterr()
    assert 'test: 11 pairs' in captured.out
    assert captured.err.endswith('transformer-jax evaluate: [Errno 27] File too large\n')
    assert list((folder / 'evaluations').iterdir()) == before


def test_a_split_that_the_data_lack_is_refused_by_name(trained, capsys):
    assert run('evaluate', '--run', trained, '--split', 'long') == 2
    assert "the data have no 'long' split; they have train, validation, test" in capsys.readouterr().err


def test_translate_writes_a_line_for_each_line(trained, standard_input, capfdbinary):
    lines = 'a b c\n\nd \u2028 e\r\nf\x0cg\n   \nh'.encode()
    standard_input(lines)
    assert run('translate', '--run', trained, '--method', 'greedy') == 0
    captured = capfdbinary.readouterr()
    found = captured.out.decode().split('\n')
    assert (len(found), found[1], found[4], found[6]) == (7, '', '', '')
    assert b'6 lines: 2 blank' in captured.err


def test_file_and_standard_input_give_the_same_bytes(trained, standard_input, capfdbinary, tmp_path):
    (tmp_path / 'in').write_bytes(b'a b c\n\nd e f\n')
    standard_input(b'a b c\n\nd e f\n')
    arguments = ['--run', trained, '--beam-size', 2, '--scores', '--checkpoint', 'latest']
    assert run('translate', *arguments) == 0
    assert run('translate', *arguments, '--input', tmp_path / 'in', '--output', tmp_path / 'out') == 0
    assert (tmp_path / 'out').read_bytes() == capfdbinary.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ['in', 'out']


def test_translate_writes_what_the_translator_says(trained, tmp_path):
    """To the byte; sampling, because a model that has hardly learned says one word over and over otherwise."""
    lines = ['b a d c', '', 'c', 'a b c d a']
    (tmp_path / 'in').write_bytes('\n'.join(lines).encode() + b'\n')
    arguments = ('--method', 'sampling', '--input', tmp_path / 'in', '--output', tmp_path / 'out')
    assert run('translate', '--run', trained, *arguments, '--config.decoding.max_extra_length=3') == 0
    translator = Translator.load(trained, method='sampling', max_extra_length=3, report=lambda line: None)
    expected = translator.translate(lines)
    assert (tmp_path / 'out').read_bytes() == ('\n'.join(expected) + '\n').encode()
    assert len(expected) == 4
    assert expected[1] == ''
    assert all(line.split() != line.split()[::-1] for line in (expected[0], expected[3]))


def test_longer_texts_than_in_training_are_translated_where_no_parameter_counts_positions(
    trained, standard_input, capfdbinary
):
    for longest, cut in ((96, True), (150, False)):
        standard_input(b'a ' * 120 + b'\n')
        changes = [f'--config.model.max_length={longest}', '--method', 'greedy']
        assert run('translate', '--run', trained, *changes) == 0
        assert (f'longer than {longest} subwords'.encode() in capfdbinary.readouterr().err) == cut


def test_a_run_records_what_auto_stood_for(trained):
    assert json.loads((trained / 'record.json').read_text())['attention'] == {
        use: {'kind': 'dot', 'impl': 'dense'} for use in ('encoder_self', 'decoder_self', 'cross')
    }


@pytest.mark.slow
def test_other_attention_on_trained_weights_says_what_it_changes(trained, capsys):
    common = ['evaluate', '--run', trained, '--config.evaluation.bleu=true', '--config.decoding.method=greedy']
    assert run(*common, '--config.model.attention.impl=blockwise') == 0
    exact = capsys.readouterr().out
    assert run(*common, '--config.model.attention.window=1', '--config.model.cross.window=none') == 0
    other = capsys.readouterr().out
    for text in (exact, other):
        assert 'beside the model as it was trained' in text
        assert 'BLEU: ' in text.partition('KL of the output distribution')[2]
    divergences = [float(text.partition('KL of the output distribution: ')[2].split()[0]) for text in (exact, other)]
    assert abs(divergences[0]) < 1e-6
    assert divergences[1] > 1e-6
    assert run('evaluate', '--run', trained, '--config.model.attention.kind=additive') == 2
    assert 'needs other parameters than were trained' in capsys.readouterr().err


def test_check_ends_with_1_where_a_check_failed(capsys, monkeypatch):
    findings = [Finding('cross', 'values', 1e-7, 5e-6), Finding('model', 'packing', None, 1e-5, 'it can not')]
    for more, code in (([], 0), ([Finding('cross', 'gradients', 1e-3, 5e-6)], 1)):
        monkeypatch.setattr(check_command, 'check_config', lambda config, more=more: [*findings, *more])
        assert run('check', SMALL[0]) == code
        captured = capsys.readouterr()
        printed = captured.out
        assert captured.err.splitlines()[:2] == ['checked cross: values', 'checked model: packing']
        assert f'1 checks passed, {code} failed, 1 not run' in printed
        assert printed.count('FAILED') == code


@pytest.mark.slow
def test_check_tells_right_from_wrong(capsys, monkeypatch, tmp_path):
    (tmp_path / 'forgetful.py').write_text(
        'import dataclasses\n'
        'from transformer_jax.attention.dense import DENSE, dense_attention\n'
        'def attend(q, k, v, mask, options):\n'
        '    return dense_attention(q, k, v, dataclasses.replace(mask, causal=False), options)\n'
        'forgetful = DENSE._replace(function=attend)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run('check', *SMALL) == 0
    printed = capsys.readouterr().out
    assert ' 0 failed' in printed
    for line in (
        'values', 'gradients', 'hidden keys have no influence', 'a row that sees nothing gives zeros',
        'padding may hold anything', 'packed segments are as if alone', 'more padding changes nothing',
        'packed pairs are as if alone', 'cached decoding is the full pass', '1 device = 8 devices',
        'later targets change nothing before them',
    ):  # fmt: skip
        assert line in printed
    assert run('check', *SMALL, '--config.model.attention.kind=forgetful:forgetful') == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if 'FAILED' in line]
    assert any('hidden keys have no influence' in line for line in failed)
    assert any('later targets change nothing' in line for line in failed)


def test_averages_are_taken_as_checkpoints(trained, capfdbinary, standard_input, tmp_path):
    assert run('average', '--run', trained, '--last', 2, '--out', tmp_path / 'mean') == 0
    standard_input(b'a b\n')
    assert (
        run('translate', '--run', trained, '--checkpoint', tmp_path / 'mean', '--format', 'jsonl', '--n-best', 2) == 0
    )
    found = json.loads(capfdbinary.readouterr().out.split(b'\n')[-2])
    assert (found['line'], found['source'], len(found['translations'])) == (1, 'a b', 2)
    assert found['translations'][0]['score'] >= found['translations'][1]['score']
    assert run('average', '--run', trained, '--last', 2, '--out', tmp_path / 'mean') == 2
    assert b'exists' in capfdbinary.readouterr().err


def test_evaluation_takes_its_batch_size_from_the_command_line(trained, capsys):
    assert run('evaluate', '--run', trained, '--batch-tokens', 'many') == 2
    assert 'config.evaluation.batch_tokens' in capsys.readouterr().err


def test_text_is_not_written_under_a_gzip_name(trained, capsys, tmp_path):
    assert run('translate', '--run', trained, '--output', tmp_path / 'out.gz') == 2
    assert 'leave .gz out' in capsys.readouterr().err


def test_show_prints_the_run(trained, capsys):
    assert run('show', '--run', trained) == 0
    text = capsys.readouterr().out
    for part in ('* ', 'config.model.d_model = 8', 'target_embedding/table', 'parameters: ', 'mesh: data 8', 'buckets'):
        assert part in text
    assert 'steps an epoch: ' in text


@pytest.mark.parametrize(('size', 'count'), [('base', '63,045,632'), ('big', '214,171,648')])
@pytest.mark.parametrize('pad', [1, 64])
def test_show_counts_the_parameters_of_the_paper(size, count, pad, capsys):
    page = f'--config={ROOT / "configs" / "wmt14_en_de.py"}:size={size}'
    assert run('show', page, f'--config.model.vocab_pad_multiple={pad}') == 0
    assert f'parameters: {count}\n' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('verb', 'arguments', 'message'),
    [
        ('translate', ['--method', 'greedy', '--n-best', 2], 'n is 2; greedy gives one translation of a line'),
        ('translate', ['--n-best', 9], 'n is 9; beam gives at most config.decoding.beam_size (4) translations'),
        ('translate', ['--n-best', 0], '--n-best is 0; it must be at least 1'),
        ('translate', ['--method', 'sampling', '--n-best', -3], '--n-best is -3; it must be at least 1'),
        ('translate', ['--beam-size', 'many'], 'config.decoding.beam_size'),
        ('translate', ['--config.model.d_model=16'], 'trained with 8'),
        ('translate', ['--config.decoding.beam=3'], 'did you mean decoding.beam_size'),
        ('translate', ['extra'], "unknown argument 'extra'"),
        ('translate', ['--checkpoint', 'nowhere'], "'nowhere' is neither a step nor best nor latest nor a folder"),
        ('translate', ['--checkpoint', 'nowhere'], 'steps 2, 4'),
        ('translate', ['--checkpoint', '3'], 'no complete checkpoint of step 3; there are: 2, 4'),
        ('evaluate', ['--checkpoint', ROOT], f'{ROOT} holds no parameters'),
        ('evaluate', ['--checkpoint', '-1'], "'-1' is neither a step nor"),
        ('evaluate', ['--checkpoint', '5'], 'no complete checkpoint of step 5; there are: 2, 4'),
        ('evaluate', ['--examples', -1], '--examples is -1; it must be at least 0'),
        ('evaluate', ['--config.optimizer.name=adamw'], 'trained with'),
        ('average', ['--last', 3, '--out', 'mean'], '3 snapshots are to be averaged, but there are 2: 2, 4'),
        ('average', ['--last', 0, '--out', 'mean'], 'last is 0'),
        ('average', ['--steps', '2,7', '--out', 'mean'], 'no snapshots or checkpoints of steps 7; there are 2, 4'),
        ('average', ['--steps', '2,two', '--out', 'mean'], "--steps is '2,two'"),
        ('average', ['--steps', '2,2', '--out', 'mean'], 'each once'),
        ('average', ['--last', 1, '--out', ROOT / 'README.md'], 'README.md exists already'),
        ('average', ['--last', 1, '--out', 'mean', '--config.seed=3'], 'average takes no changes of the config'),
    ],
)
def test_bad_use_is_told_in_one_line_and_ends_with_2(
    trained, verb, arguments, message, standard_input, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    standard_input(b'a\n')
    assert run(verb, '--run', trained, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert 'Traceback' not in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_input_that_can_not_be_read_is_named_with_its_line_before_the_model_is_loaded(
    trained, standard_input, capsys, tmp_path, monkeypatch
):
    (tmp_path / 'good').write_bytes(b'a b\nc\n')
    (tmp_path / 'bad').write_bytes(b'a\nb \xff c\nd\n')
    (tmp_path / 'cut.gz').write_bytes(gzip.compress(b'a b c\n' * 99)[:-9])
    (tmp_path / 'plain.gz').write_bytes(b'a\n')
    (tmp_path / 'locked').write_bytes(b'a\n')
    (tmp_path / 'locked').chmod(0)
    loaded = []
    monkeypatch.setattr(translate_command, 'load_translator', lambda *options: loaded.append(options))
    cases = [
        (['--input', tmp_path / 'missing'], f'{tmp_path}/missing can not be read: No such file or directory'),
        (['--input', tmp_path], f'{tmp_path} can not be read: Is a directory'),
        (['--input', tmp_path / 'bad'], f'{tmp_path}/bad line 2: not UTF-8 at byte 2 of the line'),
        (['--input', tmp_path / 'cut.gz'], f'{tmp_path}/cut.gz can not be read: Compressed file ended before'),
        (['--input', tmp_path / 'plain.gz'], f'{tmp_path}/plain.gz can not be read: Not a gzipped file'),
        (['--input', tmp_path / 'good', '--prefix-file', tmp_path / 'missing'], f'{tmp_path}/missing can not be read'),
        (['--input', tmp_path / 'good', '--prefix-file', tmp_path / 'bad'], f'{tmp_path}/bad line 2: not UTF-8'),
        (
            ['--input', tmp_path / 'good', '--prefix-file', ROOT / 'LICENSE'],
            f'{ROOT}/LICENSE has {len((ROOT / "LICENSE").read_bytes().splitlines())} lines, but {tmp_path}/good has 2',
        ),
        (['--prefix-file', '-'], '--prefix-file and --input are both standard input'),
        (['--prefix-file', tmp_path / 'good'], f'{tmp_path}/good has 2 lines, but standard input has 3'),
    ]
    if os.geteuid():
        cases.append((['--input', tmp_path / 'locked'], f'{tmp_path}/locked can not be read: Permission denied'))
    for arguments, message in cases:
        standard_input(b'a\nb\nc\n')
        assert run('translate', '--run', trained, *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    standard_input(b'a\n\xc3\n')
    assert run('translate', '--run', trained) == 2
    assert 'standard input line 2: not UTF-8' in capsys.readouterr().err
    assert loaded == []


@pytest.mark.parametrize('verb', ['train', 'show', 'evaluate', 'translate'])
def test_every_verb_checks_the_whole_config(verb, trained, standard_input, capsys, tmp_path):
    """A run whose stored config no version of this package would train: a field that its optimizer does not read."""
    folder = tmp_path / 'run'
    shutil.copytree(trained, folder)
    stored = json.loads((folder / 'config.json').read_text())
    stored['optimizer'] |= {'name': 'lion', 'epsilon': 1e-3}
    (folder / 'config.json').write_text(json.dumps(stored))
    standard_input(b'a\n')
    assert run(verb, '--run', folder) == 2
    error = capsys.readouterr().err
    assert "config.optimizer.epsilon is 0.001, but config.optimizer.name='lion' does not read it" in error
    page = f'--config={ROOT / "configs" / "copy_tiny.py"}'
    if verb in ('train', 'show'):
        assert run(verb, page, '--run', tmp_path / 'new', '--config.optimizer.schedule.peak=0.1') == 2
        assert 'config.optimizer.schedule.peak' in capsys.readouterr().err
        assert not (tmp_path / 'new').exists()


def test_no_run_no_output_and_an_output_that_exists(trained, capsys, standard_input, tmp_path, monkeypatch):
    assert run('translate', '--run', tmp_path / 'none') == 2
    assert 'there is no run folder' in capsys.readouterr().err
    (tmp_path / 'mine').write_text('precious')
    with monkeypatch.context() as patch:
        patch.setattr(os, 'access', lambda path, mode: False)
        assert run('translate', '--run', trained, '--output', tmp_path / 'out') == 2
    assert f'{tmp_path}, which may not be written' in capsys.readouterr().err
    standard_input(b'a\n')
    assert run('translate', '--run', trained, '--output', tmp_path / 'mine') == 2
    assert (tmp_path / 'mine').read_text() == 'precious'
    assert '--force' in capsys.readouterr().err
    assert run('translate', '--run', trained, '--output', tmp_path / 'no' / 'where') == 2
    assert run('translate', '--run', trained, '--output', tmp_path / 'mine', '--force', '--method', 'greedy') == 0
    assert (tmp_path / 'mine').read_text() != 'precious'


def test_output_that_was_cut_leaves_nothing(tmp_path):
    target = tmp_path / 'out'

    def cut():
        with translate_command.open_output(str(target), force=False) as file:
            file.write(b'half')
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / 'out'

    def write():
        with translate_command.open_output(str(target), force=False) as file:
            file.write(b'new')
            target.write_bytes(b'theirs')

    with pytest.raises(ValueError, match='exists'):
        write()
    assert target.read_bytes() == b'theirs'
    assert list(tmp_path.iterdir()) == [target]


def make_translation(text, score):
    return Translation(text, (5, 7), score * 2, score, 3, True)


def test_formats():
    found = [make_translation('eins', -0.5), make_translation('zwei', -1.25)]
    formats = {
        (1, False): ('eins', ''),
        (1, True): ('-0.500000\teins', '\t'),
        # Always as many lines as were asked for, so that a reader may count them.
        (2, False): ('31\teins\n31\tzwei', '32\t\n32\t'),
        (2, True): ('31\t-0.500000\teins\n31\t-1.250000\tzwei', '32\t\t\n32\t\t'),
        (3, True): ('31\t-0.500000\teins\n31\t-1.250000\tzwei\n31\t\t', '32\t\t\n32\t\t\n32\t\t'),
    }
    for (n_best, scores), (full, blank) in formats.items():
        write = translate_command.make_formatter('text', n_best=n_best, scores=scores)
        assert write(31, 'x', found[:n_best]) == full
        assert write(32, '', []) == blank
    with pytest.raises(ConfigError, match='--scores is of --format text'):
        translate_command.make_formatter('jsonl', n_best=2, scores=True)
    write = translate_command.make_formatter('jsonl', n_best=2, scores=False)
    assert json.loads(write(32, '', [])) == {'line': 32, 'source': '', 'translations': []}
    texts = [one['text'] for one in json.loads(write(31, '„x“', found))['translations']]
    assert texts == ['eins', 'zwei']
    assert '„x“' in write(31, '„x“', found)


def test_interrupts_and_signals_have_their_exit_codes(monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, 'load_config_file', interrupt)
    assert run('show', '--config=x.py') == 130


def test_failures_keep_their_traceback_and_own_errors_do_not(monkeypatch, capsys):
    def fail(error):
        def verb(options):
            raise error

        return verb

    for error, code in ((ConfigError('this'), 2), (CheckpointError('that'), 1)):
        monkeypatch.setattr(command_line, 'load_config_file', fail(error))
        assert run('show', '--config=x.py') == code
        assert capsys.readouterr().err == f'transformer-jax show: {error}\n'
    for number in (errno.ENOSPC, errno.EACCES, errno.EROFS):
        error = OSError(number, os.strerror(number), '/somewhere')
        monkeypatch.setattr(command_line, 'load_config_file', fail(error))
        assert run('show', '--config=x.py') == 1
        assert capsys.readouterr().err == f'transformer-jax show: {error}\n'
    for error in (ValueError('from elsewhere'), KeyError('x'), RuntimeError('y')):
        monkeypatch.setattr(command_line, 'load_config_file', fail(error))
        with pytest.raises(type(error)):
            run('show', '--config=x.py')


@pytest.mark.parametrize(
    'arguments',
    [
        [],
        ['trian'],
        ['train'],
        ['average', '--run', 'x', '--out', 'y'],
        ['evaluate', '--run', 'x', '--examples', 'two'],
    ],
)
def test_the_parser_refuses_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    assert 'usage' in capsys.readouterr().err


def test_a_closed_pipe_is_quiet():
    command = [sys.executable, '-m', 'transformer_jax', 'show', f'--config={ROOT / "configs" / "quickstart.py"}']
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, check=False, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, '')
