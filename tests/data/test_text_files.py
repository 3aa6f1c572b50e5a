"""Text files: lines end at LF alone, pairs never slide, and every unusable file says which and where."""

import gzip
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax import data
from transformer_jax.config import Config, ConfigError, DataConfig, TextFilesConfig
from transformer_jax.data.text_files import TextFilesSource, read_lines, scan_file

SEPARATORS = ('\u2028', '\u2029', '\u0085', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e')


def make_source(tmp_path: Path, source: bytes, target: bytes, notes: list[str] | None = None, suffix: str = '.txt'):
    paths = [tmp_path / f'train.{side}{suffix}' for side in ('en', 'de')]
    for path, content in zip(paths, (source, target), strict=True):
        path.write_bytes(gzip.compress(content) if suffix == '.txt.gz' else content)
    config = TextFilesConfig(train_source=str(paths[0]), train_target=str(paths[1]))
    return TextFilesSource(config, report=[].append if notes is None else notes.append)


@pytest.mark.parametrize('separator', SEPARATORS)
def test_only_lf_ends_a_line(tmp_path, separator):
    source = make_source(tmp_path, f'a{separator}b\nc\n'.encode(), f'A\nB{separator}\n'.encode())
    pairs = list(source.read('train'))
    assert [(pair.id, pair.source, pair.target) for pair in pairs] == [
        (0, f'a{separator}b', 'A'),
        (1, 'c', f'B{separator}'),
    ]
    assert source.size('train') == 2


LINES = st.lists(
    st.text(st.characters(exclude_categories=('Cs',), exclude_characters='\r\n\ufeff'), max_size=9), min_size=1
)


@settings(max_examples=60, deadline=None)
@given(LINES, st.booleans(), st.booleans())
def test_lines_come_back_as_they_were(tmp_path_factory, lines, final_newline, packed):
    text = '\n'.join(lines) + ('\n' if final_newline or not lines[-1] else '')
    path = tmp_path_factory.mktemp('lines') / 'file'
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert list(read_lines(str(path))) == lines


def test_carriage_returns_never_reach_the_text_and_are_counted(tmp_path):
    notes = []
    source = make_source(tmp_path, b'a\r\nb\rc\n\rd\r\n', b'1\n2\n3', notes)
    assert [pair.source for pair in source.read('train')] == ['a', 'b c', ' d']
    assert [note.split(': ')[1] for note in notes] == [
        '2 lines end in CR LF; the CR was taken off',
        '2 CRs inside lines became spaces',
    ]


def test_a_byte_order_mark_is_taken_off_and_blank_lines_are_kept(tmp_path):
    notes = []
    source = make_source(tmp_path, '\ufeffa\n\n\ufeffb\n'.encode(), b'1\n2\n3\n', notes)
    assert [pair.source for pair in source.read('train')] == ['a', '', '\ufeffb']
    assert 'byte order mark' in notes[0]
    assert '1 of 3 lines are blank' in notes[1]


def drop_middle(lines: list[bytes]) -> list[bytes]:
    return lines[:50] + lines[51:]


UNEQUAL = {
    'one missing at the end': lambda lines: lines[:-1],
    'one missing at the start': lambda lines: lines[1:],
    'one missing in the middle': drop_middle,
    'one more': lambda lines: [*lines, b'more'],
    'a blank one more': lambda lines: [*lines, b''],
    'a blank one in the middle': lambda lines: [*lines[:50], b'', *lines[50:]],
}


@pytest.mark.parametrize('suffix', ['.txt', '.txt.gz'])
@pytest.mark.parametrize('change', UNEQUAL)
def test_unequal_line_counts_are_refused_before_the_first_pair(tmp_path, change, suffix):
    lines = [b'line %d' % number for number in range(100)]
    changed = UNEQUAL[change](lines)
    source_bytes, target_bytes = (b''.join(line + b'\n' for line in side) for side in (lines, changed))
    source = make_source(tmp_path, source_bytes, target_bytes, suffix=suffix)
    with pytest.raises(ValueError) as error:
        next(source.read('train'))
    for name, count in (('train.en', 100), ('train.de', len(changed))):
        assert f'{name}{suffix} has {count} lines' in str(error.value)


def test_invalid_utf8_names_file_and_line(tmp_path):
    source = make_source(tmp_path, b'a\nb\nc \xff d\n', b'1\n2\n3\n')
    with pytest.raises(ValueError, match=r'train\.en\.txt line 3: not UTF-8 at byte 2 of the line'):
        source.size('train')


@pytest.mark.parametrize('content', [b'', b'\n\n', b'  \n'])
def test_an_empty_corpus_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match=r'train\.en\.txt is empty'):
        make_source(tmp_path, content, b'1\n').size('train')


def test_missing_unreadable_and_damaged_files_are_named(tmp_path):
    missing = TextFilesSource(TextFilesConfig(train_source=f'{tmp_path}/no.en', train_target=f'{tmp_path}/no.de'))
    with pytest.raises(ValueError, match=r'no\.en can not be read.*No such file'):
        missing.size('train')
    (tmp_path / 'folder').mkdir()
    with pytest.raises(ValueError, match='folder can not be read'):
        scan_file(f'{tmp_path}/folder')
    whole = gzip.compress(b''.join(b'line %d\n' % number for number in range(5000)))
    for name, content in (('cut', whole[:-2000]), ('bent', whole[:900] + b'\0\0\0\0' + whole[904:]), ('x', b'text')):
        path = tmp_path / f'{name}.gz'
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf'{name}\.gz can not be read'):
            scan_file(str(path))


def test_a_tsv_holds_both_sides(tmp_path):
    path = tmp_path / 'train.tsv'
    path.write_bytes('a b\tA\u2028\r\nc\t\n'.encode())
    source = TextFilesSource(TextFilesConfig(train_tsv=str(path)), report=[].append)
    assert [(pair.source, pair.target) for pair in source.read('train')] == [('a b', 'A\u2028'), ('c', '')]
    for line, columns in ((b'a\n', 1), (b'a\tb\tc\n', 3), (b'\n', 1)):
        path.write_bytes(b'x\ty\n' + line)
        with pytest.raises(ValueError, match=rf'train\.tsv line 2: {columns} columns'):
            TextFilesSource(TextFilesConfig(train_tsv=str(path)), report=[].append).size('train')


def test_the_fingerprint_is_of_the_text(tmp_path):
    plain = make_source(tmp_path, b'a\nb\n', b'1\n2\n').fingerprint('train')
    packed = make_source(tmp_path, b'a\nb\n', b'1\n2\n', suffix='.txt.gz').fingerprint('train')
    assert plain == packed
    others = [(b'a\nc\n', b'1\n2\n'), (b'1\n2\n', b'a\nb\n'), (b'b\na\n', b'2\n1\n')]
    assert len({plain, *(make_source(tmp_path, *content).fingerprint('train') for content in others)}) == 4


def test_a_file_of_hostile_bytes_keeps_its_lines(tmp_path):
    rng = random.Random(3)
    parts = [*SEPARATORS, '\r', '\t', '\0', '\x1b[0m', '\u200d', '\U0001f642', 'wort', ' ', '']
    lines = [''.join(rng.choices(parts, k=rng.randint(0, 30))) for _ in range(1000)]
    lines[400] = 'x' * 50_000
    content = '\n'.join([*lines, '']).encode()
    source = make_source(tmp_path, content, content)
    pairs = list(source.read('train'))
    assert len(pairs) == source.size('train') == content.count(b'\n')
    for line, pair in zip(lines, pairs, strict=True):
        assert pair.source == pair.target == line.removesuffix('\r').replace('\r', ' ')


BAD_SECTIONS = {
    'no file': ({}, 'names no file'),
    'one side': ({'train_source': 'a'}, r'train_source is given, but .*train_target is None'),
    'both kinds': ({'train_source': 'a', 'train_target': 'b', 'train_tsv': 'c'}, r'train_tsv is .*must be None'),
    'other split': ({'train_tsv': 'a', 'test_target': 'b'}, r'test_target is given, but .*test_source is None'),
}


@pytest.mark.parametrize('name', BAD_SECTIONS)
def test_files_that_make_no_split_are_refused_without_reading(name):
    fields, message = BAD_SECTIONS[name]
    config = Config(data=DataConfig(source='text_files', text_files=TextFilesConfig(**fields)))
    with pytest.raises(ConfigError, match=rf'config\.data\.text_files.*{message}'):
        data.check(config)


def test_an_unknown_source_names_the_nearest():
    with pytest.raises(ConfigError, match=r"config\.data\.source is 'textfiles'; .*\(did you mean 'text_files'"):
        data.check(Config(data=DataConfig(source='textfiles')))


def test_make_source_reads_the_named_files(tmp_path):
    for name, content in (('en', b'a\n'), ('de', b'A\n')):
        (tmp_path / name).write_bytes(content)
    files = TextFilesConfig(validation_source=f'{tmp_path}/en', validation_target=f'{tmp_path}/de')
    source = data.make_source(Config(data=DataConfig(source='text_files', text_files=files)))
    assert source.splits() == ('validation',)
    assert [tuple(pair[:3]) for pair in source.read('validation')] == [(0, 'a', 'A')]
    with pytest.raises(ValueError, match="no files for the split 'train'; there are validation"):
        source.size('train')
