"""Every config page loads, survives being saved, and means what its words say."""

import ast
import importlib.util
from pathlib import Path

import jax
import pytest

import transformer_jax
from transformer_jax import models
from transformer_jax.config import Config, ConfigError, ExecutionConfig, MeshConfig, check
from transformer_jax.overlay import config_from_dict, config_to_dict, load_config_file, overlay
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.parallel.rules import sharding_tree
from transformer_jax.recipes import RECIPES, SIZES

FOLDER = Path(transformer_jax.__file__).parent.parent / 'configs'
ARGUMENTS = {'multi30k_en_de.py': 'folder=x', 'text_files.py': 'folder=x,source=en,target=de'}
PAGES = sorted(path.name for path in FOLDER.glob('*.py'))


def load(name, more=''):
    text = ','.join(filter(None, (ARGUMENTS.get(name, ''), more)))
    return load_config_file(f'{FOLDER / name}:{text}')


@pytest.mark.parametrize('name', PAGES)
def test_a_page_loads_and_round_trips(name):
    config = load(name)
    check(config)
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize('name', PAGES)
def test_a_page_says_command_and_score(name):
    words = ast.get_docstring(ast.parse((FOLDER / name).read_text())) or ''
    assert f'--config=configs/{name}' in words
    assert 'Score:' in words
    if name.startswith('wmt'):
        assert 'Sections 5 and 6.1' in words
        assert 'Hardware:' in words


@pytest.mark.parametrize('name', PAGES)
def test_a_page_refuses_what_it_does_not_take(name):
    with pytest.raises(ConfigError, match="unknown config argument 'sizee=big'"):
        load(name, 'sizee=big')


@pytest.mark.parametrize('name', [name for name in PAGES if name != 'copy_tiny.py'])
@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('recipe', RECIPES)
def test_a_page_takes_each_size_and_recipe(name, size, recipe):
    config = load(name, f'size={size},recipe={recipe}')
    assert config.model.d_model == SIZES[size]['model.d_model']
    assert config.train.smoothing_over == RECIPES[recipe]['train.smoothing_over']


def test_the_wmt_pages_are_the_papers_settings():
    base, big = load('wmt14_en_de.py'), load('wmt14_en_de.py', 'size=big')
    assert base.model == Config().model
    assert base.optimizer == Config().optimizer
    assert (base.train.steps, big.train.steps) == (100_000, 300_000)
    assert (base.model.dropout_rate, big.model.dropout_rate) == (0.1, 0.3)
    assert (big.model.d_model, big.model.d_ff, big.model.attention.num_heads) == (1024, 4096, 16)
    assert (base.checkpoint.average_keep, big.checkpoint.average_keep) == (5, 20)
    assert base.vocabulary.size == big.vocabulary.size == 37_000
    french = load('wmt14_en_fr.py', 'size=big')
    assert (french.model.dropout_rate, french.vocabulary.size) == (0.1, 32_000)
    assert (french.source_language, french.target_language) == ('en', 'fr')


def test_an_implementation_of_attention_can_be_asked_for():
    assert load('wmt14_en_de.py', 'attention=dense').model.attention.impl == 'dense'


def test_the_files_of_the_text_pages():
    files = load('multi30k_en_de.py').data.text_files
    assert (files.train_source, files.test_target) == ('x/train.en.gz', 'x/test_2016_flickr.de.gz')
    own = load('text_files.py').data.text_files
    assert (own.train_source, own.validation_target) == ('x/train.en', 'x/valid.de')
    with pytest.raises(ConfigError, match=r'needs source=\.\.\., target='):
        load_config_file(f'{FOLDER}/text_files.py:folder=x')


@pytest.mark.parametrize('name', PAGES)
def test_every_page_is_valid_for_every_package(name):
    from transformer_jax import models

    models.validate(load(name))


SWEEPS = sorted(path.name for path in (FOLDER / 'sweeps').glob('*.py'))


def sweep_points():
    for name in SWEEPS:
        spec = importlib.util.spec_from_file_location(name.removesuffix('.py'), FOLDER / 'sweeps' / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        base = load_config_file(f'{FOLDER.parent / module.BASE}')
        for point, changes in module.points():
            yield pytest.param(base, changes, id=f'{name}: {point}')


@pytest.mark.parametrize(('base', 'changes'), list(sweep_points()))
def test_every_point_of_a_sweep_is_a_config(base, changes):
    models.validate(overlay(base, changes))


def placed(config):
    """Where each parameter of a config's model lies on a mesh of one device."""
    model = models.build(config.model, vocab_size=97, start_id=1, execution=ExecutionConfig(unroll=1))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sharding_tree(model.logical_axes(), shapes, make_mesh(MeshConfig(), jax.devices()[:1]))


@pytest.mark.parametrize(('base', 'changes'), list(sweep_points()))
def test_every_parameter_of_a_sweep_has_its_place_on_the_mesh(base, changes):
    assert jax.tree.leaves(placed(overlay(base, changes)))


@pytest.mark.parametrize(
    'page', ['recurrent.py:attention=none,cell=lstm', 'recurrent.py:attention=luong', 'convolutional.py',
             'encoder_only.py', 'decoder_only.py', 'decoder_only.py:task=language_model']
)  # fmt: skip
def test_every_parameter_of_a_family_has_its_place_on_the_mesh(page):
    assert jax.tree.leaves(placed(load_config_file(f'{FOLDER / page}')))
