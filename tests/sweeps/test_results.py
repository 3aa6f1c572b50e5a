"""What is read of a finished training, and the rows made of it."""

import csv
import dataclasses
import io
import json

import numpy as np
import pytest

from transformer_jax.evaluation.bleu import sacrebleu_score
from transformer_jax.evaluation.significance import Difference, Interval
from transformer_jax.sweeps import table
from transformer_jax.sweeps.points import Point
from transformer_jax.sweeps.results import ACCURACY, BLEU, Cost, Row, describe_changes, read_cost, read_score

REFERENCES = ['der Hund beißt den Mann .', 'die Katze sieht heute nicht gern fern .', 'das ist ein Haus .']
HYPOTHESES = ['der Hund beißt den Mann .', 'die Katze sieht heute gern fern .', 'das war mein Haus .']


def write_evaluation(folder, hypotheses=None):
    folder.mkdir()
    (folder / 'test.json').write_text(json.dumps({'accuracy': 0.625}))
    if hypotheses is not None:
        for name, lines in (('hypotheses', hypotheses), ('references', REFERENCES)):
            (folder / f'test.{name}.txt').write_text(''.join(f'{line}\n' for line in lines))
    return str(folder)


def test_text_is_scored_by_sacrebleu_as_evaluate_does(tmp_path):
    reached = read_score(write_evaluation(tmp_path / 'e', HYPOTHESES), 'test', False, 'de')
    assert reached.name == BLEU
    assert reached.value == pytest.approx(sacrebleu_score(HYPOTHESES, REFERENCES, 'de').value)
    assert reached.lines == tuple(REFERENCES)
    assert np.ptp(reached.resampled) > 0


def test_a_model_that_translates_nothing_has_its_accuracy(tmp_path):
    reached = read_score(write_evaluation(tmp_path / 'e'), 'test', True, None)
    assert (reached.name, reached.value, reached.resampled) == (ACCURACY, 62.5, None)


def test_the_cost_of_a_run_that_was_cut_and_went_on(tmp_path):
    records = [
        {'event': 'start', 'step': 0},
        {'event': 'header', 'parameters': 17},
        {'event': 'compile', 'seconds': 50.0},
        {'event': 'train', 'step': 3, 'steps_per_second': 2.0, 'seconds': 60.0},
        {'event': 'train', 'step': 6, 'steps_per_second': None, 'seconds': 63.0},
        {'event': 'evaluation', 'step': 6},
        {'event': 'resume', 'step': 6},
        {'event': 'header', 'parameters': 17},
        {'event': 'train', 'step': 9, 'steps_per_second': 10.0, 'seconds': 5.0},
        {'event': 'train', 'step': 12, 'steps_per_second': 4.0, 'seconds': 6.0},
        {'event': 'end', 'step': 12, 'wall_seconds': 8.0},
    ]
    (tmp_path / 'metrics.jsonl').write_text(''.join(f'{json.dumps(one)}\n' for one in records))
    (tmp_path / 'record.json').write_text(json.dumps({'peak_memory': {'host_bytes': 11, 'device_bytes': 13}}))
    assert read_cost(tmp_path) == Cost(17, 12, 0.25, 11, 13, 63.0 + 8.0)
    assert read_cost(tmp_path / 'nothing') == Cost(None, None, None, None, None, None)


def test_what_all_points_change_alike_makes_no_difference():
    points = [Point('a', 'a', {'x': 1, 'y': None}), Point('b', 'b', {'x': 1, 'y': 2}), Point('c', 'c', {'x': 1})]
    assert [describe_changes(point, points) for point in points] == ['y=none', 'y=2', '']
    assert describe_changes(points[1], points[1:2]) == 'x=1, y=2'


ROWS = [
    Row('a|b', 'finished', 'x=1', 2, 2, BLEU, 31.25, Interval(29.5, 33.0), 0.5, None,
        Cost(10, 3, 0.5, 5 << 20, None, 9.0)),
    Row('c, d', 'finished', '', 2, 2, BLEU, 30.0, Interval(28.0, 32.0), 0.25,
        Difference(-1.25, Interval(-2.0, -0.5), 0.003), Cost(12, 3, 0.25, 5 << 20, 7 << 20, 8.0)),
    Row('e', 'failed', 'x=3', 2, 0, reason='train: "so"\nit is'),
]  # fmt: skip


def test_the_csv_file_reads_back_whole():
    first, second, third = csv.DictReader(io.StringIO(table.to_csv(ROWS)))
    assert (first['point'], first['score'], first['difference'], first['peak_device_bytes']) == ('a|b', '31.25', '', '')
    assert (second['p_value'], second['difference_low'], second['peak_device_bytes']) == ('0.003', '-2.0', str(7 << 20))
    assert (third['reason'], third['seeds_finished'], third['score']) == ('train: "so"\nit is', '0', '')


def test_the_markdown_table_is_one():
    lines = table.to_markdown('mine', ROWS, ['a note']).splitlines()
    rows = [line for line in lines if line.startswith('|')]
    assert len(rows) == 2 + len(ROWS)
    assert len({line.replace('\\|', '').count('|') for line in rows}) == 1
    assert 'sacreBLEU' in rows[0]
    assert '| a\\|b ' in rows[2]
    assert '31.25 [29.50, 33.00]' in rows[2]
    assert '5 MiB host' in rows[2]
    assert '-1.25 [-2.00, -0.50]' in rows[3]
    assert '7 MiB device' in rows[3]
    assert 'train: "so" it is' in rows[4]
    assert lines[-1] == '- a note'


def test_a_terminal_has_a_line_for_each_point():
    lines = table.to_lines(ROWS)
    assert len(lines) == 1 + len(ROWS)
    assert lines[3].split()[:2] == ['e', 'failed']
    (line,) = table.to_lines([dataclasses.replace(ROWS[0], differs='d' * 100)])[1:]
    assert f'{"d" * 37}...  31.25' in line
