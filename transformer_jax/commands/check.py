"""The verb `check`: is this config's attention right, on this machine?"""

from transformer_jax.checking import check_config, format_table
from transformer_jax.commands import validation
from transformer_jax.commands.evaluator import say
from transformer_jax.config import Config


def check_run(config: Config) -> bool:
    """Prints the table of findings; True when all passed. Says meanwhile how far it is, since it takes minutes."""
    validation.check_config(config)
    findings = []
    for finding in check_config(config):
        findings.append(finding)
        say(f'checked {finding.subject}: {finding.check}')
    print(format_table(findings))
    failed = sum(not one.passed for one in findings)
    skipped = sum(one.error is None for one in findings)
    print(f'{len(findings) - failed - skipped} checks passed, {failed} failed, {skipped} not run')
    return not failed
