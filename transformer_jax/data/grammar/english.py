"""English inflection: plurals, verb forms, articles and number words."""

_UNITS = (
    'zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen '
    'seventeen eighteen nineteen'
).split()
_TENS = ('', '', 'twenty', 'thirty', 'forty', 'fifty', 'sixty', 'seventy', 'eighty', 'ninety')
_IRREGULAR_ORDINALS = {
    'one': 'first', 'two': 'second', 'three': 'third', 'five': 'fifth', 'eight': 'eighth', 'nine': 'ninth',
    'twelve': 'twelfth',
}  # fmt: skip
# Words whose first letter does not tell whether they begin with a vowel sound.
_CONSONANT_SOUND = ('useful', 'useless')


def add_s(word: str) -> str:
    """The regular plural of a noun, and the third person singular of a verb."""
    if word.endswith(('s', 'x', 'z', 'ch', 'sh', 'o')):
        return word + 'es'
    if word.endswith('y') and word[-2] not in 'aeiou':
        return word[:-1] + 'ies'
    return word + 's'


def indefinite_article(next_word: str) -> str:
    return 'an' if next_word[0] in 'aeiou' and not next_word.startswith(_CONSONANT_SOUND) else 'a'


def cardinal(number: int) -> str:
    """The number word from 0 to 99: twenty-three."""
    if number < 20:
        return _UNITS[number]
    tens, unit = divmod(number, 10)
    return f'{_TENS[tens]}-{_UNITS[unit]}' if unit else _TENS[tens]


def ordinal(number: int) -> str:
    """The ordinal word from 1 to 99: twenty-third."""
    head, dash, last = cardinal(number).rpartition('-')
    if last.endswith('y'):
        return head + dash + last[:-1] + 'ieth'
    return head + dash + _IRREGULAR_ORDINALS.get(last, last + 'th')
