"""The oracle suite: is a configured variant right? For the verb `check`, and for the tests of variants of your own."""

from transformer_jax.checking.attention_checks import check_variant
from transformer_jax.checking.findings import Finding, format_table
from transformer_jax.checking.model_checks import check_config

__all__ = ['Finding', 'check_config', 'check_variant', 'format_table']
