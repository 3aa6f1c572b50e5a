"""The few padded shapes that decoding uses: each combination that occurs is one compiled program.

Lengths (of sources, prefixes and caches) are rounded up to 16, 24, 32, 48, 64, 96, ...; rows to the batch size halved,
halved again, and so on. With batches of 64 and lengths up to 256 that is at most 9 source lengths, 7 row counts and
11 cache lengths, of which a sorted text meets some dozens of combinations.
"""

_SHORTEST = 16
_FEWEST_ROWS = 8  # fewer are not worth another program


def round_length(length: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, 128, ... that is at least `length`."""
    size = _SHORTEST
    while size < length:
        half_more = size * 3 // 2
        if length <= half_more:
            return half_more
        size *= 2
    return size


def row_sizes(batch_size: int) -> tuple[int, ...]:
    """The row counts, largest first: `batch_size`, half of it rounded up, and so on down to 1."""
    sizes = [batch_size]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return tuple(sizes)


def fit_rows(num_sentences: int, batch_size: int) -> int:
    """The smallest row count that holds these sentences."""
    return min(size for size in row_sizes(batch_size) if size >= num_sentences)


def fewer_rows(rows: int) -> int | None:
    """What a batch of this many rows shrinks to once so few sentences are still searched; None = it stays as it is."""
    fewer = (rows + 1) // 2
    return fewer if fewer >= _FEWEST_ROWS else None
