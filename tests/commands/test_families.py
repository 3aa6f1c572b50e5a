"""Encoder-only and decoder-only models through the verbs: what each is for works, the rest is refused with a reason."""

import io
import json
import sys

import pytest

from tests.test_command_line import SMALL, run

FAMILIES = {
    'masked': ['--config.model.family=encoder_only', '--config.model.positions=learned'],
    'language model': ['--config.model.family=decoder_only', '--config.model.decoder_only.task=language_model'],
    'prefix': ['--config.model.family=decoder_only', '--config.data.batching=packing'],
}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The run of a family, trained when first asked for."""
    folders = {}

    def train(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp('runs') / name.replace(' ', '_')
            assert run('train', '--run', folders[name], *SMALL, *FAMILIES[name]) == 0
        return folders[name]

    return train


@pytest.fixture
def standard_input(monkeypatch):
    def give(content):
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(content)))

    return give


@pytest.mark.slow
def test_a_masked_language_model_is_evaluated_alike_each_time_and_translates_nothing(trained, capsys):
    folder = trained('masked')
    printed = []
    for tokens in ('64', '512'):
        assert run('evaluate', '--run', folder, '--batch-tokens', tokens) == 0
        printed.append(capsys.readouterr().out.splitlines())
    assert 'masked source subwords' in printed[0][0]
    assert 'words,' not in printed[0][0]
    assert [line for line in printed[0] if line.startswith('accuracy: ')]
    assert printed[0][0] == printed[1][0]
    assert printed[0][2:] == printed[1][2:]
    for verb in ('translate', 'generate'):
        assert run(verb, '--run', folder) == 2
        error = capsys.readouterr().err
        assert f'made for masked language modelling, which does not {verb}; use evaluate' in error
        assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_a_language_model_continues_each_prompt(trained, standard_input, capfd):
    folder = trained('language model')
    standard_input(b'a b\n\nc\n')
    arguments = ['--run', folder, '--method', 'sampling', '--max-extra-length', 5]
    assert run('generate', *arguments, '--seed', 3) == 0
    captured = capfd.readouterr()
    lines = captured.out.split('\n')
    assert len(lines) == 4
    assert lines[0].startswith('a b')
    assert lines[2].startswith('c')
    assert '3 prompts: 1 blank' in captured.err
    standard_input(b'a b\n')
    assert run('generate', *arguments, '--n-best', 2, '--format', 'jsonl', '--top-k', 4) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found['line'], found['prompt'], len(found['texts'])) == (1, 'a b', 2)
    assert all(1 <= one['length'] <= 5 for one in found['texts'])


def test_a_language_model_has_a_perplexity_and_no_translations(trained, capsys):
    folder = trained('language model')
    assert run('evaluate', '--run', folder) == 0
    assert 'perplexity: ' in capsys.readouterr().out
    assert run('evaluate', '--run', folder, '--examples', 2) == 2
    assert '--examples shows translations' in capsys.readouterr().err
    assert run('translate', '--run', folder) == 2
    assert 'made for language modelling, which does not translate; use generate' in capsys.readouterr().err
    assert run('evaluate', '--run', folder, '--config.evaluation.bleu=true') == 2
    assert 'config.evaluation.bleu is True' in capsys.readouterr().err


@pytest.mark.slow
def test_a_prefix_language_model_translates(trained, standard_input, capfd):
    folder = trained('prefix')
    assert run('evaluate', '--run', folder, '--config.decoding.beam_size=2', '--examples', 1) == 0
    captured = capfd.readouterr().out
    assert 'exact match: ' in captured
    assert captured.count('reference: ') == 1
    standard_input(b'a b c\n\nd e\n')
    assert run('translate', '--run', folder, '--beam-size', 2) == 0
    assert len(capfd.readouterr().out.split('\n')) == 4
    assert run('generate', '--run', folder) == 2
    assert 'made for translation, which does not generate; use translate' in capfd.readouterr().err
    assert run('train', '--run', folder) == 0  # nothing is left to do
    assert run('average', '--run', folder, '--last', 2, '--out', folder.parent / 'mean') == 0
