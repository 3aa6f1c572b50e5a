"""The checks of recurrent decoders pass what is right and tell what is wrong."""

import dataclasses

import jax.numpy as jnp
import pytest

from tests.checking.small import first_findings, make_config, names_of_failed
from transformer_jax.layers import recurrence
from transformer_jax.models import recurrent_decoder


def make_recurrent(**changes):
    given = {'family': 'recurrent', 'positions': 'none', 'attention__num_heads': 8, 'attention__head_dim': 64}
    return make_config(**given | {'num_decoder_layers': 2, 'num_encoder_layers': 1} | changes)


def scale_scores(monkeypatch):
    real = recurrent_decoder.scoring_of
    monkeypatch.setattr(
        recurrent_decoder, 'scoring_of', lambda config: dataclasses.replace(real(config), scale='inverse_sqrt')
    )


def forget_the_reset(monkeypatch):
    def step(gates, state, kernel):
        return recurrence.gru_step(gates.at[..., 1, :].set(9.0), state, kernel)

    monkeypatch.setitem(recurrence.CELLS, 'gru', recurrence.CELLS['gru']._replace(step=step))


def look_at_padding(monkeypatch):
    real = recurrent_decoder.look_up

    def look_up(config, weights, source, query, segment_ids):
        source = dataclasses.replace(source, segment_ids=jnp.maximum(source.segment_ids, 1))
        return real(config, weights, source, query, segment_ids)

    monkeypatch.setattr(recurrent_decoder, 'look_up', look_up)


@pytest.mark.parametrize(
    ('plant', 'attention', 'told'),
    [
        (scale_scores, ('luong', 'dot'), {'values', 'gradients', 'its steps are those of the equations'}),
        (look_at_padding, ('bahdanau', 'general'), {'values', 'gradients', 'its steps are those of the equations'}),
        (forget_the_reset, ('none', 'general'), {'its steps are those of the equations'}),
    ],
)
def test_a_wrong_recurrent_decoder_is_told(plant, attention, told, monkeypatch):
    config = make_recurrent(recurrence__attention=attention[0], recurrence__luong_score=attention[1])
    plant(monkeypatch)
    assert set(names_of_failed(first_findings(config, 3))) == told


@pytest.mark.parametrize(
    ('cell', 'attention', 'score', 'feeding'),
    [
        ('lstm', 'luong', 'general', True),
        pytest.param('gru', 'bahdanau', 'general', True, marks=pytest.mark.slow),
        pytest.param('rnn', 'luong', 'concat', False, marks=pytest.mark.slow),
        pytest.param('gru', 'luong', 'dot', True, marks=pytest.mark.slow),
        pytest.param('gru', 'none', 'general', True, marks=pytest.mark.slow),
    ],
)
def test_recurrent_decoders_pass(cell, attention, score, feeding):
    changes = {'cell': cell, 'attention': attention, 'luong_score': score, 'input_feeding': feeding}
    found = first_findings(make_recurrent(**{f'recurrence__{name}': v for name, v in changes.items()}), 3)
    assert [one.check for one in found] == ['values', 'gradients', 'its steps are those of the equations']
    assert names_of_failed(found) == []
    assert (found[0].error is None) == (attention == 'none')
