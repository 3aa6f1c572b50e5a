"""The corpus of the toy runs, prepared once."""

import pytest

from tests.training.toy_training import Toy


@pytest.fixture(scope='session')
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp('toy'))
