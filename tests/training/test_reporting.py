"""What a run reports: read back from the files, a pseudo-terminal and a plain stream."""

import contextlib
import errno
import io
import json
import math
import os
import pty
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from tensorboardX.proto.event_pb2 import Event, SessionLog

from transformer_jax import files
from transformer_jax.config import LoggingConfig
from transformer_jax.training.figure_files import JsonLines, read_figures
from transformer_jax.training.reporting import Reporter, Stopwatch


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Device:
    device_kind = 'toy chip'


def make_figures(**changes: float) -> dict[str, float]:
    figures = {'loss': 3.25, 'nll': 3.0, 'perplexity': 20.0855, 'learning_rate': 3e-4, 'gradient_norm': 1.5}
    return figures | {'target_tokens': 4000, 'padding': 0.093, 'bad_steps': 0} | changes


def make_reporter(
    folder: Path, *, stream: Any = None, clock: Clock | None = None, start_step: int = 0, **changes: Any
) -> Reporter:
    reporter = Reporter(
        folder / 'figures.jsonl',
        folder / 'tensorboard',
        LoggingConfig(tensorboard=changes.pop('tensorboard', False)),
        total_steps=changes.pop('total_steps', 1000),
        stream=io.StringIO() if stream is None else stream,
        clock=clock or Clock(),
        **changes,
    )
    reporter.begin(start_step)
    return reporter


def read_events(folder: Path) -> list[Event]:
    """Every event of a folder in writing order, from the record framing: length, checksum, data, checksum."""
    events = []
    for path in sorted((folder / 'tensorboard').iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack('Q', data[:8])
            event = Event()
            event.ParseFromString(data[12 : 12 + length])
            events.append(event)
            data = data[16 + length :]
    return events


def test_stopwatch_splits_nested_time_without_counting_twice() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.wait(1)
    with watch.timing('evaluation'):
        clock.wait(2)
        with watch.timing('compile'):
            clock.wait(4)
        clock.wait(8)
    with watch.timing('step'):
        clock.wait(16)
    seconds = watch.seconds()
    assert seconds == {'data': 0, 'step': 16, 'compile': 4, 'evaluation': 10, 'checkpoint': 0, 'other': 1}
    assert sum(seconds.values()) == watch.total() == 31
    assert watch.training() == 17


def test_stopwatch_goes_on_after_an_exception() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.timing('data'):
            clock.wait(3)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.wait(2)
    assert watch.seconds()['data'] == 3
    assert watch.seconds()['other'] == 2


def test_stopwatch_refuses_an_unknown_activity() -> None:
    with pytest.raises(ValueError, match=r"'sleep'.*'checkpoint'"), Stopwatch(Clock()).timing('sleep'):
        pass


def test_plain_lines(tmp_path: Path) -> None:
    stream, clock = io.StringIO(), Clock()
    with make_reporter(tmp_path, stream=stream, clock=clock) as reporter:
        reporter.header([Device(), Device()], 63_045_632)
        with reporter.timing('compile'):
            clock.wait(12.34)
        reporter.compiled('train step 32 x 16', 12.34)
        for step in range(1, 51):
            with reporter.timing('step'):
                clock.wait(0.1)
            reporter.advance(step)
        reporter.step(50, make_figures())
        reporter.evaluation(50, {'perplexity': 7.5, 'bleu': 23.4123, 'pairs': 1014}, note='best so far')
    split = 'preparation 0.0 s, data 0.0 s, step 5.0 s, compile 12.3 s, evaluation 0.0 s, checkpoint 0.0 s, other 0.0 s'
    assert stream.getvalue().split('\n') == [
        'devices: 2 x toy chip',
        'parameters: 63,045,632',
        'compiled train step 32 x 16 in 12.3 s',
        'step 50/1,000  loss 3.250  ppl 20.09  lr 3.0e-04  800 tok/s  pad 9.3%  ETA 0:01:35',
        'validation after step 50: perplexity 7.5  bleu 23.41  pairs 1,014  (best so far)',
        f'wall time 17.3 s: {split}; goodput 28.8% (steps / wall time)',
        '',
    ]


def test_skipped_updates_stand_out(tmp_path: Path) -> None:
    stream = io.StringIO()
    with make_reporter(tmp_path, stream=stream) as reporter:
        reporter.step(50, make_figures(bad_steps=2, loss=math.nan))
    assert 'SKIPPED 2 non-finite' in stream.getvalue()


def test_speed_leaves_out_what_is_not_training(tmp_path: Path) -> None:
    clock = Clock()
    with make_reporter(tmp_path, clock=clock, total_steps=100) as reporter:
        for step, (evaluation, training) in {10: (30.0, 4.0), 20: (0.0, 5.0), 30: (7.0, 2.0)}.items():
            with reporter.timing('evaluation'):
                clock.wait(evaluation)
            with reporter.timing('data'):
                clock.wait(training)
            reporter.step(step, make_figures(target_tokens=1000))
    trained = [record for record in read_figures(tmp_path / 'figures.jsonl') if record['event'] == 'train']
    assert [record['tokens_per_second'] for record in trained] == [250.0, 200.0, 500.0]
    assert [record['steps_per_second'] for record in trained] == [2.5, 2.0, 5.0]
    assert [record['eta_seconds'] for record in trained] == [34 / 10 * 90, 39 / 20 * 80, 48 / 30 * 70]


def test_files_hold_the_figures_of_the_console(tmp_path: Path) -> None:
    with make_reporter(tmp_path, tensorboard=True) as reporter:
        reporter.header([Device()], 11)
        reporter.step(50, make_figures())
        reporter.evaluation(50, {'bleu': 23.5})
    records = read_figures(tmp_path / 'figures.jsonl')
    assert [record['event'] for record in records] == ['start', 'header', 'train', 'evaluation', 'end']
    assert records[1]['parameters'] == 11
    assert records[2]['step'] == 50
    assert records[2]['loss'] == 3.25
    scalars = {
        value.tag: (event.step, pytest.approx(value.simple_value, rel=1e-6))
        for event in read_events(tmp_path)
        for value in event.summary.value
    }
    assert scalars['train/loss'] == (50, 3.25)
    assert scalars['train/perplexity'] == (50, 20.0855)
    assert scalars['validation/bleu'] == (50, 23.5)
    assert 'train/step' not in scalars


def test_non_finite_figures_stay_valid_json(tmp_path: Path) -> None:
    with make_reporter(tmp_path) as reporter:
        reporter.step(50, make_figures(loss=math.nan, perplexity=math.inf))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = (tmp_path / 'figures.jsonl').read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert records[1]['loss'] is None
    assert records[1]['perplexity'] is None


@pytest.mark.parametrize('first', [0, 70])
def test_a_resumed_run_replaces_what_the_cut_one_wrote_beyond(tmp_path: Path, first: int) -> None:
    with make_reporter(tmp_path, tensorboard=True, start_step=first) as cut:
        for step in (50, 100, 150, 200):
            cut.step(step, make_figures(loss=float(step)))
            cut.evaluation(step, {'bleu': float(step)})
    with (tmp_path / 'figures.jsonl').open('a') as file:
        file.write('{"event": "train", "st')  # where a kill cut it
    stream = io.StringIO()
    with make_reporter(tmp_path, tensorboard=True, start_step=100, stream=stream) as resumed:
        resumed.header([Device()], 11)
        for step in (150, 200):
            resumed.step(step, make_figures(loss=-float(step)))
    assert 'resumes after step 100 of 1,000' in stream.getvalue()
    records = [json.loads(line) for line in (tmp_path / 'figures.jsonl').read_text().splitlines()]
    assert records == read_figures(tmp_path / 'figures.jsonl')
    trained = [record for record in records if record['event'] == 'train']
    assert [(r['step'], r['loss']) for r in trained] == [(50, 50), (100, 100), (150, -150), (200, -200)]
    assert [r['step'] for r in records if r['event'] == 'evaluation'] == [50, 100]
    assert [(r['event'], r['step']) for r in records if r['event'] in ('start', 'resume')] == [
        ('resume' if first else 'start', first),
        ('resume', 100),
    ]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ['figures.jsonl']
    starts = [event.step for event in read_events(tmp_path) if event.session_log.status == SessionLog.START]
    assert starts == [101]  # TensorBoard hides events from this step on that were written before


def test_a_run_that_starts_anew_replaces_all_that_a_cut_one_wrote(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        with make_reporter(tmp_path, tensorboard=True) as reporter:
            reporter.step(50, make_figures(loss=loss))
    trained = [r for r in read_figures(tmp_path / 'figures.jsonl') if r['event'] == 'train']
    assert [(r['step'], r['loss']) for r in trained] == [(50, 2.0)]
    assert [event.step for event in read_events(tmp_path) if event.session_log.status == SessionLog.START] == [1]


def test_lines_that_are_no_records_are_left_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / 'figures.jsonl'
    path.write_text('a note\n{"event": "train", "step": 60}\n[1]\n{"event": "compile"}\n')
    JsonLines(epath.Path(path), 50).close()
    assert path.read_text() == 'a note\n[1]\n{"event": "compile"}\n'


def test_eta_and_speed_of_a_resumed_run_count_its_own_steps_alone(tmp_path: Path) -> None:
    clock = Clock()
    with make_reporter(tmp_path, clock=clock, start_step=900) as reporter:
        clock.wait(20.0)
        reporter.step(910, make_figures())
    (record,) = [r for r in read_figures(tmp_path / 'figures.jsonl') if r['event'] == 'train']
    assert record['eta_seconds'] == 180.0
    assert record['steps_per_second'] == 0.5


def test_what_comes_before_the_first_update_does_not_slow_the_pace(tmp_path: Path) -> None:
    clock = Clock()
    reporter = Reporter(
        tmp_path / 'figures.jsonl', tmp_path, LoggingConfig(tensorboard=False), total_steps=20, clock=clock
    )
    with reporter:
        clock.wait(7.0)
        with reporter.timing('compile'):
            clock.wait(11.0)
        reporter.begin(0)
        with reporter.timing('compile'):
            clock.wait(13.0)
        with reporter.timing('step'):
            clock.wait(5.0)
        reporter.step(10, make_figures(target_tokens=1000))
    (record,) = [r for r in read_figures(tmp_path / 'figures.jsonl') if r['event'] == 'train']
    assert (record['tokens_per_second'], record['eta_seconds']) == (200.0, 5.0)


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / 'figures.jsonl'
    with make_reporter(tmp_path) as reporter:
        reporter.step(50, make_figures())
    with path.open('a') as file:
        file.write('{"event": "train", "st')
    assert [r['event'] for r in read_figures(path)] == ['start', 'train', 'end']
    with make_reporter(tmp_path, start_step=50):
        pass
    assert [r['event'] for r in read_figures(path)] == ['start', 'train', 'end', 'resume', 'end']
    assert len(path.read_text().splitlines()) == 5


def test_a_bad_line_elsewhere_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / 'figures.jsonl'
    path.write_text('{"event": "start", "step": 0}\n{"event": \n{"event": "train", "step": 50}\n')
    with pytest.raises(ValueError, match='line 2'):
        read_figures(path)


class GoneTerminal(io.StringIO):
    """A terminal whose window was closed: every use of it fails."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, 'Input/output error')

    def flush(self) -> None:
        raise OSError(errno.EIO, 'Input/output error')

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError(errno.EIO, 'Input/output error')


@pytest.mark.parametrize('kind', ['gone', 'closed'])
def test_a_run_outlives_its_terminal(tmp_path: Path, kind: str) -> None:
    stream = GoneTerminal() if kind == 'gone' else io.StringIO()
    if kind == 'closed':
        stream.close()
    with make_reporter(tmp_path, stream=stream) as reporter:
        reporter.header([Device()], 11)
        reporter.advance(1)
        reporter.step(50, make_figures())
        reporter.evaluation(50, {'bleu': 1.0})
    events = [record['event'] for record in read_figures(tmp_path / 'figures.jsonl')]
    assert events == ['start', 'header', 'train', 'evaluation', 'end']


def test_a_console_of_another_encoding_shows_escapes(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with make_reporter(tmp_path, stream=io.TextIOWrapper(raw, encoding='ascii')) as reporter:
        reporter.say('Bär')
        assert raw.getvalue() == b'B\\xe4r\n'


def test_a_full_disk_does_not_stop_the_run_but_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with make_reporter(tmp_path, stream=stream, tensorboard=True) as reporter:

        def full(record: object) -> None:
            raise OSError(errno.ENOSPC, 'No space left on device')

        for writer in reporter._writers:
            monkeypatch.setattr(writer, 'write', full)
        reporter.step(50, make_figures())
        reporter.step(100, make_figures())
    lines = stream.getvalue().split('\n')
    assert [line for line in lines if 'could not write figures' in line and 'No space left' in line] == [lines[0]]
    assert 'WARNING: 6 writes to the files of figures failed; they are incomplete' in lines


def test_only_the_primary_process_reports(tmp_path: Path) -> None:
    stream = io.StringIO()
    with make_reporter(tmp_path, stream=stream, primary=False, tensorboard=True) as reporter:
        reporter.header([Device()], 11)
        reporter.advance(1)
        reporter.step(50, make_figures())
    assert stream.getvalue() == ''
    assert list(tmp_path.iterdir()) == []


def read_terminal(ours: int, seen: list[bytes]) -> None:
    """Reads all that is written to a pseudo-terminal, until its other end is closed."""
    with contextlib.suppress(OSError):
        while data := os.read(ours, 1000):
            seen.append(data)
    os.close(ours)


@pytest.mark.parametrize('size', [(0, 0), (40, 110)])
def test_a_terminal_gets_one_live_bar_below_the_lines(tmp_path: Path, size: tuple[int, int]) -> None:
    ours, theirs = pty.openpty()
    if size != (0, 0):
        import fcntl
        import termios

        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', *size, 0, 0))
    seen: list[bytes] = []
    reader = threading.Thread(target=read_terminal, args=(ours, seen))
    reader.start()
    with (
        os.fdopen(theirs, 'w', encoding='utf-8') as stream,
        make_reporter(tmp_path, stream=stream, start_step=500) as reporter,
    ):
        reporter.say('first line')
        for step in range(501, 551):
            reporter.advance(step)
        reporter.step(550, make_figures())
        reporter.evaluation(550, {'bleu': 23.5})
    reader.join()
    shown = b''.join(seen).decode()
    assert shown.startswith('first line')
    bars = [part for part in shown.replace('\n', '\r').split('\r') if '%|' in part]
    assert any('550/1000, loss 3.250  ppl 20.09' in bar for bar in bars), shown
    assert '50%|' in bars[0]
    assert not any('step 550/1,000' in part for part in shown.split('\r'))  # no plain line beside the bar
    assert 'validation after step 550: bleu 23.5' in shown


def test_object_stores_get_the_whole_file_at_each_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without appending: the old text is read once and the whole text is written again."""
    path = epath.Path(tmp_path / 'figures.jsonl')
    path.write_text('{"event": "start", "step": 0}\n{"event"')
    monkeypatch.setattr(files, 'is_local', lambda path: False)
    file = JsonLines(path, 0)
    file.write({'event': 'resume', 'step': 0})
    assert len(path.read_text().split('\n')) == 2  # not yet
    file.flush()
    assert [record['event'] for record in read_figures(path)] == ['start', 'resume']
    file.write({'event': 'end', 'step': 7})
    file.close()
    assert [record['event'] for record in read_figures(path)] == ['start', 'resume', 'end']


def test_where_the_time_went_is_kept_at_the_end_and_on_the_way(tmp_path: Path) -> None:
    clock, kept = Clock(), []
    reporter = make_reporter(tmp_path, clock=clock, start_step=10, keep=kept.append, seconds_before=6.0)
    with reporter.timing('compile'):
        clock.wait(2)
    with reporter.timing('step'):
        clock.wait(11)
    reporter.step(20, make_figures())
    assert [split['to_step'] for split in kept] == [20]
    with reporter.timing('data'):
        clock.wait(1)
    reporter.step(30, make_figures())
    assert len(kept) == 1, 'not at every line'
    reporter.flush()  # a checkpoint is about to be written
    assert kept[1]['shares'] == pytest.approx(
        {'preparation': 6 / 20, 'compile': 2 / 20, 'step': 11 / 20, 'data': 1 / 20}
        | {'evaluation': 0, 'checkpoint': 0, 'other': 0}
    )
    clock.wait(33)
    reporter.step(40, make_figures())
    reporter.close()
    assert [split['to_step'] for split in kept] == [20, 30, 40, 40]
    assert (kept[-1]['from_step'], kept[-1]['wall_seconds']) == (10, 53.0)
    assert sum(kept[-1]['shares'].values()) == pytest.approx(1, abs=1e-12)
    (end,) = [record for record in read_figures(tmp_path / 'figures.jsonl') if record['event'] == 'end']
    assert (end['wall_seconds'], end['goodput']) == (53.0, 11 / 53)


def test_a_split_that_can_not_be_kept_does_not_stop_the_run(tmp_path: Path) -> None:
    def fail(split: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')

    stream = io.StringIO()
    reporter = make_reporter(tmp_path, stream=stream, keep=fail)
    reporter.step(1, make_figures())
    reporter.close()
    assert 'could not write figures' in stream.getvalue()
