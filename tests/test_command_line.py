"""The command line: every verb on one small run, exit codes, and output that appears whole or not at all."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_jax.__main__ as command_line
from transformer_jax.checkpoints.digests import CheckpointError
from transformer_jax.commands import translate as translate_command
from transformer_jax.config import ConfigError
from transformer_jax.decoding.translator import Translation

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


def test_averages_are_taken_as_checkpoints(trained, capfdbinary, standard_input, tmp_path):
    assert run('average', '--run', trained, '--last', 2, '--out', tmp_path / 'mean') == 0
    standard_input(b'a b\n')
    assert (
        run('translate', '--run', trained, '--checkpoint', tmp_path / 'mean', '--format', 'jsonl', '--n-best', 2) == 0
    )
    found = json.loads(capfdbinary.readouterr().out.split(b'\n')[-2])
    assert (found['line'], found['source'], len(found['translations'])) == (1, 'a b', 2)
    assert found['translations'][0]['score'] >= found['translations'][1]['score']
    assert run('average', '--run', trained, '--last', 2, '--out', tmp_path / 'mean') == 1
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
    ('arguments', 'message'),
    [
        (['--method', 'greedy', '--n-best', 2], 'n is 2'),
        (['--beam-size', 'many'], 'config.decoding.beam_size'),
        (['--checkpoint', 'nowhere'], 'nowhere'),
        (['--config.model.d_model=16'], 'trained with 8'),
        (['--config.decoding.beam=3'], 'did you mean decoding.beam_size'),
        (['--input', 'missing.txt'], 'missing.txt'),
        (['extra'], "unknown argument 'extra'"),
    ],
)
def test_bad_use_is_told_in_one_line(trained, arguments, message, standard_input, capsys):
    standard_input(b'a\n')
    assert run('translate', '--run', trained, *arguments) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert 'Traceback' not in error


def test_no_run_no_output_and_an_output_that_exists(trained, capsys, standard_input, tmp_path):
    assert run('translate', '--run', tmp_path / 'none') == 2
    assert 'there is no run folder' in capsys.readouterr().err
    (tmp_path / 'mine').write_text('precious')
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
        (2, False): ('31\teins\n31\tzwei', '32\t'),
        (2, True): ('31\t-0.500000\teins\n31\t-1.250000\tzwei', '32\t\t'),
    }
    for (n_best, scores), (full, blank) in formats.items():
        write = translate_command.make_formatter('text', n_best=n_best, scores=scores)
        assert write(31, 'x', found[:n_best]) == full
        assert write(32, '', []) == blank
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
    for error in (ValueError('from elsewhere'), KeyError('x'), RuntimeError('y')):
        monkeypatch.setattr(command_line, 'load_config_file', fail(error))
        with pytest.raises(type(error)):
            run('show', '--config=x.py')


@pytest.mark.parametrize(
    'arguments',
    [[], ['trian'], ['train'], ['average', '--run', 'x', '--out', 'y'], ['evaluate', '--run', 'x', '--split', 'dev']],
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
