"""The longest text may differ between a run and how it is opened, where no parameter has a row for each position."""

from typing import Any

import pytest

from transformer_jax.config import AttentionOverlayConfig, ConfigError, ModelConfig
from transformer_jax.decoding.opened_run import require_no_table
from transformer_jax.positions import SCHEMES

LOW_RANK = AttentionOverlayConfig(kind='low_rank')


def require(**changes: Any) -> None:
    require_no_table(ModelConfig(max_length=64, **changes), 65, 'a/run')


@pytest.mark.parametrize('positions', [name for name in SCHEMES if name != 'learned'])
def test_a_longer_text_fits_what_has_no_table(positions: str) -> None:
    require(positions=positions)


@pytest.mark.parametrize('changes', [{'positions': 'learned'}, {'cross': LOW_RANK}])
def test_a_table_ends_where_training_did(changes: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r'max_length is 65, but .* a/run has learned rows for 64 positions'
    ) as caught:
        require(**changes)
    assert str(caught.value).endswith("positions of 'none', 'sinusoidal', 'shaw', 'rope', 't5', 'alibi'")
