"""What is asked of a search, sentence by sentence, and which sentences are searched together."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One sentence to search for. Lengths are those of the continuation, the forced prefix not counted."""

    source: tuple[int, ...]  # with eos
    prefix: tuple[int, ...]
    limit: int  # most subwords, eos included; at least 1
    min_length: int  # fewest subwords before eos
    seed: int = 0  # what makes its random draws its own; below 2^32


def seed_of(content: tuple[tuple[int, ...], tuple[int, ...]], repeat: int) -> int:
    """What a sentence's random draws depend on: its source and prefix, and how often the same ones came before."""
    digest = hashlib.blake2b(repr((content, repeat)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, 'little')


def group_requests(requests: dict[int, Request], batch_size: int) -> list[list[int]]:
    """The keys in batches: sentences of like length together, those with a prefix apart, the longest first."""

    def shape(key: int) -> tuple[bool, int, int]:
        return bool(requests[key].prefix), len(requests[key].source), len(requests[key].prefix)

    order = sorted(requests, key=shape, reverse=True)
    num_forced = sum(bool(request.prefix) for request in requests.values())
    groups = (order[:num_forced], order[num_forced:])
    return [group[start : start + batch_size] for group in groups for start in range(0, len(group), batch_size)]
