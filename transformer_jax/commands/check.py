"""The verb `check`: is this config's attention right, on this machine?"""

from transformer_jax.checking import check_config, format_table
from transformer_jax.commands import validation
from transformer_jax.config import Config


def check_run(config: Config) -> bool:
    """Prints the table of findings; True when all passed."""
    validation.check_config(config)
    findings = list(check_config(config))
    print(format_table(findings))
    failed = sum(not one.passed for one in findings)
    skipped = sum(one.error is None for one in findings)
    print(f'{len(findings) - failed - skipped} checks passed, {failed} failed, {skipped} not run')
    return not failed
