"""What a hypothesis's log probability is divided by, so that short outputs are not preferred. Paper section 6.1."""

import math
from dataclasses import dataclass

from transformer_jax.config import ConfigError
from transformer_jax.shapes import Array


@dataclass(frozen=True)
class LengthPenalty:
    """`gnmt`: ((5 + L) / 6)^alpha; `power`: L^alpha. L counts the scored subwords, eos among them.

    `alpha` is any real number: above 0 favours long outputs, 0 compares plain log probabilities, below 0 favours short.
    """

    kind: str
    alpha: float

    def __call__(self, length: Array | int) -> Array | float:
        """The divisor for hypotheses of this length (at least 1)."""
        return self._base(length) ** self.alpha

    def best(self, shortest: Array | int, longest: Array | int) -> Array | float:
        """The divisor most in favour of a hypothesis whose length will be within these bounds, both included.

        Log probabilities are never above 0, so the largest divisor gives the best score: the one of the longest for
        alpha above 0, of the shortest below 0.
        """
        return self(longest if self.alpha > 0 else shortest)

    def check(self, longest: int) -> None:
        """Raises `ConfigError` when the divisor of some length up to `longest` is no normal float32 number."""
        try:
            divisor = float(self._base(longest)) ** self.alpha
        except OverflowError:
            divisor = math.inf
        if not 1e-37 < divisor < 1e37:
            raise ConfigError(
                f'config.decoding.alpha is {self.alpha}; the penalty of length {longest} would be {divisor:g}, which '
                'single precision can not hold; choose alpha nearer to 0'
            )

    def _base(self, length: Array | int) -> Array | float:
        return (5.0 + length) / 6.0 if self.kind == 'gnmt' else length * 1.0
