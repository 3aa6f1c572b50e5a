"""Text to subword ids and back. The vocabulary alone knows pad, bos, eos and unk.

`JointVocabulary` is one SentencePiece model for both sides (paper section 5.1); see `vocabulary_training`.
`MarianVocabulary` is the OPUS-MT layout: a SentencePiece model a side and one table from piece to id.
"""

import abc
import hashlib
import json
import re
from collections.abc import Sequence

import sentencepiece
from etils import epath
from sentencepiece import sentencepiece_model_pb2

from transformer_jax import files
from transformer_jax.config import ConfigError

DESCRIPTION_FILE = 'vocabulary.json'


class Vocabulary(abc.ABC):
    """Subword ids of both sides. `start_id` is the decoder's first input: bos, or pad as Marian does."""

    kind: str  # the name that `load_vocabulary` finds the class by
    size: int
    pad_id: int
    eos_id: int
    unk_id: int
    bos_id: int | None
    start_id: int
    fingerprint: str  # of what decides the ids of a text; not of a file

    @abc.abstractmethod
    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without eos; pad, bos and eos never occur whatever the text says."""

    @abc.abstractmethod
    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode_source`, for the other side."""

    @abc.abstractmethod
    def piece(self, token: int) -> str:
        """The piece as the model file spells it."""

    @abc.abstractmethod
    def files(self) -> dict[str, bytes]:
        """What to write beside the description, by file name."""

    @abc.abstractmethod
    def _join(self, ids: list[int]) -> str:
        """Text of ids that hold no specials."""

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """One line of text for each sequence, read up to its first eos.

        Specials are left out, bytes that are no UTF-8 become U+FFFD, and line ends become spaces, so that n sequences
        stay n lines. Raises `ValueError` for an id outside the vocabulary.
        """
        return [self._decode_one(sequence) for sequence in ids]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The pieces of one sequence, specials included."""
        return [self.piece(int(token)) for token in ids]

    def save(self, folder: str | epath.Path) -> None:
        """Writes the vocabulary into a folder, whole or not at all; one that holds another vocabulary is refused."""
        folder = epath.Path(folder)
        if holds_vocabulary(folder):
            if (there := load_vocabulary(folder).fingerprint) != self.fingerprint:
                raise ValueError(f'{folder} holds another vocabulary ({there[:12]}, not {self.fingerprint[:12]})')
            return
        names = ('kind', 'size', 'pad_id', 'eos_id', 'unk_id', 'bos_id', 'start_id', 'fingerprint')
        description = json.dumps({name: getattr(self, name) for name in names}, indent=1) + '\n'
        folder.mkdir(parents=True, exist_ok=True)
        # The description comes last, under its name only when it is whole: where it is, all the others are.
        for name, content in (self.files() | {DESCRIPTION_FILE: description.encode()}).items():
            files.write_whole(folder / name, content)

    def _decode_one(self, sequence: Sequence[int]) -> str:
        kept = []
        for token in map(int, sequence):
            if not 0 <= token < self.size:
                raise ValueError(f'id {token} is outside the vocabulary of {self.size}')
            if token == self.eos_id:
                break
            kept.append(token)
        specials = {self.pad_id, self.bos_id, self.unk_id}
        text = self._join([token for token in kept if token not in specials])
        if self.unk_id in kept:  # the spaces on its two sides would stand together
            text = re.sub(' {2,}', ' ', text).strip(' ')
        return text.replace('\r', ' ').replace('\n', ' ')


class JointVocabulary(Vocabulary):
    """One SentencePiece model for both sides, with the ids that the model itself declares.

    `start_id` None means bos where there is one, else pad. `name` is what errors call the model.
    """

    kind = 'joint'

    def __init__(self, model: bytes, *, start_id: int | None = None, name: str = 'the SentencePiece model'):
        self._model = model
        self._processor = _load_processor(model, name)
        processor = self._processor
        self.size = processor.get_piece_size()
        self.pad_id, self.eos_id, self.unk_id = processor.pad_id(), processor.eos_id(), processor.unk_id()
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else None
        _check_specials(name, {'pad': self.pad_id, 'eos': self.eos_id, 'unk': self.unk_id})
        if start_id is None:
            start_id = self.pad_id if self.bos_id is None else self.bos_id
        if start_id not in (self.pad_id, self.bos_id):
            raise ValueError(f'start id {start_id} of {name} must be pad ({self.pad_id}) or bos ({self.bos_id})')
        self.start_id = start_id
        self.fingerprint = _hash_parts([_describe_model(model), repr((self.size, start_id)).encode()])

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), out_type=int)

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_source(texts)

    def piece(self, token: int) -> str:
        return self._processor.id_to_piece(token)

    def files(self) -> dict[str, bytes]:
        return {'spm.model': self._model}

    def _join(self, ids: list[int]) -> str:
        return self._processor.decode([token for token in ids if not self._processor.is_control(token)])


class MarianVocabulary(Vocabulary):
    """The OPUS-MT layout: `source` and `target` SentencePiece models, and ids by piece for both.

    A piece that the table lacks is unk. A leading language token such as `>>deu<<` is one piece where the table has it.
    """

    kind = 'marian'
    bos_id = None

    def __init__(self, source_model: bytes, target_model: bytes, ids: dict[str, int], *, name: str = 'vocab.json'):
        self._models = (source_model, target_model)
        self._source = _load_processor(source_model, 'source.spm')
        self._target = _load_processor(target_model, 'target.spm')
        self._ids = dict(ids)
        if sorted(self._ids.values()) != list(range(len(self._ids))):
            raise ValueError(f'the ids of {name} must be 0 to {len(self._ids) - 1}, each once')
        if missing := {'<pad>', '</s>', '<unk>'} - set(self._ids):
            raise ValueError(f'{name} lacks {", ".join(sorted(missing))}')
        self._pieces = sorted(self._ids, key=self._ids.__getitem__)
        self.size = len(self._pieces)
        self.pad_id, self.eos_id, self.unk_id = self._ids['<pad>'], self._ids['</s>'], self._ids['<unk>']
        self.start_id = self.pad_id
        self._text_ids = {piece: i for piece, i in self._ids.items() if piece not in ('<pad>', '</s>', '<s>')}
        table = json.dumps(self._pieces).encode()
        self.fingerprint = _hash_parts([_describe_model(source_model), _describe_model(target_model), table])

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        sources, languages = [], []
        for text in texts:
            match = re.match('>>.+?<<', text)
            language = [self._ids[match.group()]] if match and match.group() in self._ids else []
            languages.append(language)
            sources.append(text[match.end() :] if match and language else text)
        return [language + ids for language, ids in zip(languages, self._encode(self._source, sources), strict=True)]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(self._target, texts)

    def piece(self, token: int) -> str:
        return self._pieces[token]

    def files(self) -> dict[str, bytes]:
        table = json.dumps(self._ids, ensure_ascii=False, indent=1).encode()
        return {'source.spm': self._models[0], 'target.spm': self._models[1], 'vocab.json': table}

    def _encode(self, processor: sentencepiece.SentencePieceProcessor, texts: Sequence[str]) -> list[list[int]]:
        pieces = processor.encode(list(texts), out_type=str)
        return [[self._text_ids.get(piece, self.unk_id) for piece in line] for line in pieces]

    def _join(self, ids: list[int]) -> str:
        # Pieces that only the source model has come back as they are spelled, word marks included.
        return self._target.decode_pieces([self._pieces[token] for token in ids]).replace('\u2581', ' ').strip(' ')


def holds_vocabulary(folder: str | epath.Path) -> bool:
    """Whether `save` has finished in this folder: what a killed process or a full disk has left is none."""
    return (epath.Path(folder) / DESCRIPTION_FILE).exists()


def load_vocabulary(folder: str | epath.Path) -> Vocabulary:
    """The vocabulary that `save` wrote. Raises `ValueError` when it is not there or not what was saved."""
    folder = epath.Path(folder)
    path = folder / DESCRIPTION_FILE
    if not path.exists():
        raise ValueError(f'{folder} holds no vocabulary: {DESCRIPTION_FILE} is missing')
    try:
        description = json.loads(path.read_text())
        if description['kind'] == JointVocabulary.kind:
            model = (folder / 'spm.model').read_bytes()
            vocabulary = JointVocabulary(model, start_id=description['start_id'], name=f'{folder}/spm.model')
        elif description['kind'] == MarianVocabulary.kind:
            table = json.loads((folder / 'vocab.json').read_text())
            models = (folder / 'source.spm').read_bytes(), (folder / 'target.spm').read_bytes()
            vocabulary = MarianVocabulary(*models, table, name=f'{folder}/vocab.json')
        else:
            raise ValueError(f'kind {description["kind"]!r} is not joint or marian')
        expected = description['fingerprint']
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f'the vocabulary in {folder} can not be read: {error}') from error
    if vocabulary.fingerprint != expected:
        raise ValueError(f'the vocabulary in {folder} is not the one that was saved: its fingerprint differs')
    return vocabulary


def _load_processor(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    if not model:
        raise ConfigError(f'{name} is not a SentencePiece model: it is empty')
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ConfigError(f'{name} is not a SentencePiece model: {error}') from error


def _check_specials(name: str, specials: dict[str, int]) -> None:
    words = ', '.join(f'{special} {"none" if i < 0 else i}' for special, i in specials.items())
    if min(specials.values()) < 0 or len(set(specials.values())) < len(specials):
        raise ConfigError(f'{name} has {words}; all three must exist and differ')


def _describe_model(model: bytes) -> bytes:
    """Pieces, scores, kinds and the normaliser: what decides the ids of a text, without the trainer's own settings."""
    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(model)
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    normalizer = proto.normalizer_spec
    switches = (normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces)
    specials = (proto.trainer_spec.pad_id, proto.trainer_spec.eos_id, proto.trainer_spec.unk_id)
    specials += (proto.trainer_spec.bos_id, proto.trainer_spec.byte_fallback, proto.trainer_spec.model_type)
    return repr((pieces, switches, specials, normalizer.precompiled_charsmap)).encode()


def _hash_parts(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, 'big') + part)
    return digest.hexdigest()
