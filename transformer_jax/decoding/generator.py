"""Text in, longer text out: what a language model makes of a list of prompts, in their order."""

from collections import Counter
from collections.abc import Sequence

from transformer_jax.decoding.requests import Request, seed_of
from transformer_jax.decoding.text_search import Counts, TextSearch, Translation, require_lines
from transformer_jax.decoding.width import check_count
from transformer_jax.shapes import PRNGKey


class Generator(TextSearch):
    """A language model with the vocabulary and settings to continue texts by.

    `config.max_extra_length` is how many subwords, eos among them, a text may be longer than its prompt.
    """

    ability = 'generates'

    def generate(self, prompts: Sequence[str], *, rng: PRNGKey | None = None) -> list[str]:
        """The best text for each prompt, which it begins with. See `generate_n_best`."""
        return [texts[0].text for texts in self.generate_n_best(prompts, 1, rng=rng)]

    def generate_n_best(self, prompts: Sequence[str], n: int, *, rng: PRNGKey | None = None) -> list[list[Translation]]:
        """The `n` best texts for each prompt, best first, the prompt included but not scored.

        A blank prompt asks for a text from its beginning. `rng` (default: key 0) makes the draws of sampling, which do
        not depend on a prompt's neighbours; equal prompts draw apart. Raises `ValueError` for a prompt too long for the
        model, or an `n` that the method can not give.
        """
        check_count(n, self.config)
        require_lines(prompts=prompts)
        before = Counts(**vars(self.counts))
        results = self._search(self._make_requests(prompts), len(prompts), n, rng)
        if unfinished := self.counts.unfinished - before.unfinished:
            self._report(f'{unfinished:,} of {len(prompts):,} texts were cut by the limit on length')
        return results

    def _make_requests(self, prompts: Sequence[str]) -> dict[int, Request]:
        config = self.config
        requests: dict[int, Request] = {}
        seen: Counter[tuple[int, ...]] = Counter()
        for line, ids in enumerate(self.vocabulary.encode_target(prompts)):
            self.counts.lines += 1
            self.counts.blank += not ids
            prompt = tuple(ids)
            self._require_fits(len(prompt) + 1, 'prompt', line)
            least = max(config.min_length - len(prompt), 0)
            limit = min(max(config.max_extra_length, least + 1), self.model.max_length - len(prompt))
            seed = seed_of(((), prompt), seen[prompt])
            requests[line] = Request((), prompt, limit, least, seed=seed)
            seen[prompt] += 1
        return requests
