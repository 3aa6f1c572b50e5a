"""The built-in task: English-German sentence pairs from a grammar and a lexicon of our own, with gold annotation.

lexicon (nouns, verbs, modifiers) -> generator -> meaning -> english_sentence, german_sentence -> source
"""

from .annotation import LONG_WORDS, PHENOMENA
from .counting import count_pairs
from .source import SPLITS, GrammarSource

__all__ = ['LONG_WORDS', 'PHENOMENA', 'SPLITS', 'GrammarSource', 'count_pairs']
