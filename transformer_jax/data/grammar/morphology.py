"""German inflection: articles, adjective endings, nouns, pronouns, verb forms and number words.

Gender is 'm', 'f' or 'n'; an agreement class is a gender in the singular and 'p' in the plural, where gender is lost.
"""

CASES = ('nominative', 'accusative', 'dative', 'genitive')
AGREEMENT_CLASSES = ('m', 'f', 'n', 'p')

# Endings of der and of every word that declines like it (dieser, jeder), by case; m f n p.
_STRONG_ENDINGS = {
    'nominative': ('er', 'e', 'es', 'e'),
    'accusative': ('en', 'e', 'es', 'e'),
    'dative': ('em', 'er', 'em', 'en'),
    'genitive': ('es', 'er', 'es', 'er'),
}
_DEFINITE = {
    'nominative': ('der', 'die', 'das', 'die'),
    'accusative': ('den', 'die', 'das', 'die'),
    'dative': ('dem', 'der', 'dem', 'den'),
    'genitive': ('des', 'der', 'des', 'der'),
}
_RELATIVE = {
    'nominative': ('der', 'die', 'das', 'die'),
    'accusative': ('den', 'die', 'das', 'die'),
    'dative': ('dem', 'der', 'dem', 'denen'),
}
_PERSONAL = {
    'nominative': ('er', 'sie', 'es', 'sie'),
    'accusative': ('ihn', 'sie', 'es', 'sie'),
    'dative': ('ihm', 'ihr', 'ihm', 'ihnen'),
}
# ein, kein and the possessives have no ending in these places, so that the adjective must show gender and case there.
_MIXED_BARE = {('nominative', 'm'), ('nominative', 'n'), ('accusative', 'n')}

_UNITS = ('null', 'eins', 'zwei', 'drei', 'vier', 'fünf', 'sechs', 'sieben', 'acht', 'neun', 'zehn', 'elf', 'zwölf')
_TEENS = {
    13: 'dreizehn',
    14: 'vierzehn',
    15: 'fünfzehn',
    16: 'sechzehn',
    17: 'siebzehn',
    18: 'achtzehn',
    19: 'neunzehn',
}
_TENS = ('', '', 'zwanzig', 'dreißig', 'vierzig', 'fünfzig', 'sechzig', 'siebzig', 'achtzig', 'neunzig')
_IRREGULAR_ORDINALS = {1: 'erst', 3: 'dritt', 7: 'siebt', 8: 'acht'}


def _at(row: tuple[str, ...], agreement: str) -> str:
    return row[AGREEMENT_CLASSES.index(agreement)]


def definite_article(agreement: str, case: str) -> str:
    return _at(_DEFINITE[case], agreement)


def der_word(stem: str, agreement: str, case: str) -> str:
    """A word that declines like the definite article: `dies`, `jed`, or in the plural `viel`, `einig`, `all`."""
    return stem + _at(_STRONG_ENDINGS[case], agreement)


def ein_word(stem: str, agreement: str, case: str) -> str:
    """A word that declines like the indefinite article: `ein`, `kein`, `sein`, `ihr`."""
    return stem if (case, agreement) in _MIXED_BARE else stem + _at(_STRONG_ENDINGS[case], agreement)


def adjective_ending(declension: str, agreement: str, case: str) -> str:
    """The ending after a der-word (`weak`), an ein-word (`mixed`) or no article at all (`strong`)."""
    if declension == 'strong':
        # The genitive of m and n is -en even without an article (trotz starken Regens).
        return 'en' if case == 'genitive' and agreement in 'mn' else _at(_STRONG_ENDINGS[case], agreement)
    if declension == 'mixed' and (case, agreement) in _MIXED_BARE:
        return _at(_STRONG_ENDINGS[case], agreement)
    plain_e = case == 'nominative' or (case == 'accusative' and agreement != 'm')
    return 'e' if plain_e and agreement != 'p' else 'en'


def add_ending(stem: str, ending: str) -> str:
    """Joins stem and ending; a stem in -e takes only what follows the e (müde, müden)."""
    return stem + (ending[1:] if stem.endswith('e') else ending)


def decline_noun(singular: str, plural: str, genitive_ending: str, gender: str, agreement: str, case: str) -> str:
    if agreement == 'p':
        return plural + 'n' if case == 'dative' and plural[-1] not in 'ns' else plural
    if gender == 'f' or case == 'nominative':
        return singular
    is_weak = gender == 'm' and genitive_ending.endswith('n')
    return singular + genitive_ending if case == 'genitive' or is_weak else singular


def relative_pronoun(agreement: str, case: str) -> str:
    return _at(_RELATIVE[case], agreement)


def personal_pronoun(agreement: str, case: str) -> str:
    """The third person: er, sie, es and the plural sie."""
    return _at(_PERSONAL[case], agreement)


def possessive_stem(agreement: str) -> str:
    return 'sein' if agreement in 'mn' else 'ihr'


def past_plural(singular: str) -> str:
    """sah, sahen; kaufte, kauften."""
    return singular + ('n' if singular.endswith('e') else 'en')


def cardinal(number: int) -> str:
    """The number word from 0 to 99, units before tens: dreiundzwanzig."""
    if number < 13:
        return _UNITS[number]
    if number < 20:
        return _TEENS[number]
    tens, unit = divmod(number, 10)
    if not unit:
        return _TENS[tens]
    return ('ein' if unit == 1 else _UNITS[unit]) + 'und' + _TENS[tens]


def ordinal(number: int) -> str:
    """The stem of the ordinal from 1 to 99, without its adjective ending: dritt, einundzwanzigst."""
    if number in _IRREGULAR_ORDINALS:
        return _IRREGULAR_ORDINALS[number]
    return cardinal(number) + ('t' if number < 20 else 'st')
