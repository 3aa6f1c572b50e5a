"""Lists of marked words and their punctuation, the same for both languages."""

Words = list[tuple[str, tuple[int, ...]]]  # each word and the nodes of the meaning that it expresses


def add_comma(words: Words) -> None:
    """Puts a comma after the last word, unless one is there."""
    text, nodes = words[-1]
    if not text.endswith(','):
        words[-1] = (text + ',', nodes)


def finish(words: Words) -> Words:
    """A capital for the first word, a full stop for the last."""
    text, nodes = words[-1]
    words[-1] = (text.rstrip(',') + '.', nodes)
    text, nodes = words[0]
    words[0] = (text[0].upper() + text[1:], nodes)
    return words
