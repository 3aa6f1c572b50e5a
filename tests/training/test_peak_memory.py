"""The peak of a process's memory: at least what an array took, and never below an earlier start's."""

import numpy as np

from transformer_jax.training.peak_memory import measure_peak_memory


def test_the_peak_holds_what_was_taken_and_freed():
    before = measure_peak_memory()['host_bytes'] or 0
    size = before + (64 << 20)
    taken = np.ones(size // 8)
    del taken
    assert (measure_peak_memory()['host_bytes'] or 0) >= size


def test_an_earlier_start_counts_where_it_took_more():
    assert measure_peak_memory({'host_bytes': 1 << 60, 'device_bytes': 7}) == {'host_bytes': 1 << 60, 'device_bytes': 7}
    assert (measure_peak_memory({'host_bytes': 1, 'device_bytes': None})['host_bytes'] or 0) > 1 << 20
    assert measure_peak_memory()['device_bytes'] is None  # a CPU's device has the host's memory
