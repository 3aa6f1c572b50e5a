"""Overrides, config files and differences between runs: what each way to write a value does."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.config import Config, ConfigError, ModelConfig, allowed_types, walk
from transformer_jax.overlay import (
    config_from_dict,
    config_to_dict,
    fixed_differences,
    from_config_dict,
    load_config_file,
    overlay,
    parse_arguments,
    parse_overrides,
    to_config_dict,
)
from transformer_jax.recipes import RECIPES, SIZES, apply

PATHS = [path for path, _, _ in walk(Config())]


def read(config, path):
    for name in path.split('.'):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ('path', 'written', 'expected'),
    [
        ('optimizer.epsilon', '1e-4', 1e-4),
        ('optimizer.epsilon', 1e-4, 1e-4),
        ('optimizer.schedule.factor', '2', 2.0),
        ('optimizer.schedule.factor', 2, 2.0),
        ('model.d_model', '256', 256),
        ('train.steps', '60_000', 60_000),
        ('logging.tensorboard', 'False', False),
        ('logging.tensorboard', 'false', False),
        ('model.output_bias', 'true', True),
        ('model.output_bias', True, True),
        ('optimizer.schedule.warmup_steps', 'None', None),
        ('optimizer.schedule.warmup_steps', 'none', None),
        ('optimizer.schedule.warmup_steps', '', None),
        ('optimizer.schedule.warmup_steps', None, None),
        ('optimizer.clip_norm', '1', 1.0),
        ('train.ema_decay', '0.999', 0.999),
        ('model.attention.value_dim', '32', 32),
        ('execution.remat', 'none', 'none'),
        ('execution.compilation_cache', 'none', None),
        ('data.text_files.train_source', '17', '17'),
        ('source_language', 'true', 'true'),
    ],
)
def test_a_value_becomes_the_type_of_its_field(path, written, expected):
    value = read(overlay(Config(), {path: written}), path)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ('path', 'written', 'rule'),
    [
        ('model.d_model', 256.0, 'must be int'),
        ('model.d_model', '256.0', 'whole number'),
        ('train.steps', '1e4', 'whole number'),
        ('model.d_model', True, 'must be int'),
        ('model.d_model', 'wide', 'whole number'),
        ('model.d_model', None, 'must be int'),
        ('model.d_model', 'none', 'whole number'),
        ('model.dropout_rate', 'fast', 'must be a number'),
        ('model.dropout_rate', False, 'must be a number'),
        ('model.dropout_rate', 'nan', 'finite'),
        ('optimizer.epsilon', 'inf', 'finite'),
        ('logging.tensorboard', 1, 'must be bool'),
        ('logging.tensorboard', 'yes', 'true or false'),
        ('model.family', 3, 'must be str'),
        ('model.norm', 'layernorm', 'layer_norm'),
        ('optimizer.clip_norm', '-1', 'above 0'),
        ('execution.mesh.data', '0', 'at least 1'),
        ('model.dropout_rate', '1', 'below 1'),
        ('train.steps', {'a': 3}, 'not a group'),
    ],
)
def test_a_value_of_another_type_or_outside_its_rule_is_refused_by_name(path, written, rule):
    with pytest.raises(ConfigError, match=rf'config\.{path} is .*{rule}'):
        overlay(Config(), {path: written})


@pytest.mark.parametrize(
    ('typo', 'meant'),
    [
        ('model.d_modle', 'model.d_model'),
        ('modle.d_model', 'model.d_model'),
        ('d_model', 'model.d_model'),
        ('train.warmup_steps', 'optimizer.schedule.warmup_steps'),
        ('optimizer.lr_schedule.peak', 'optimizer.schedule.peak'),
        ('training.steps', 'train.steps'),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(typo, meant):
    with pytest.raises(ConfigError, match=f'no field config.{typo} .*did you mean.*{meant}'):
        overlay(Config(), {typo: '1'})


def test_a_group_is_no_field():
    with pytest.raises(
        ConfigError, match='config.optimizer is a group; name one of its fields: name, beta1, .*schedule$'
    ):
        overlay(Config(), {'optimizer': 'adam'})


def test_overlay_leaves_the_config_as_it_was():
    before = Config()
    after = overlay(before, {'model.attention.num_heads': 3, 'seed': 5})
    assert (before.model.attention.num_heads, before.seed) == (8, 0)
    assert (after.model.attention.num_heads, after.seed) == (3, 5)
    assert after.model.attention.head_dim == before.model.attention.head_dim


def test_overrides_are_taken_apart_at_the_first_equals_sign():
    found = parse_overrides(['--config.a.b=c=d', '--config.x=', '--config.x=2'])
    assert found == {'a.b': 'c=d', 'x': '2'}


@pytest.mark.parametrize('argument', ['--config.model.d_model', '--confg.model.d_model=3', 'runs/a', '--verbose'])
def test_other_arguments_are_refused(argument):
    with pytest.raises(ConfigError, match=argument):
        parse_overrides([argument])


def wild_values(field):
    choices = field.metadata.get('choices')
    strategies = {
        int: st.integers(-3, 10**6),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: st.sampled_from(choices) if choices else st.text(max_size=8),
        type(None): st.none(),
    }
    return st.one_of([strategies[t] for t in allowed_types(field)])


@given(st.data())
def test_configs_survive_dicts_json_and_config_dicts(data):
    fields = {path: field for path, field, _ in walk(Config())}
    chosen = data.draw(st.lists(st.sampled_from(PATHS), max_size=3, unique=True))
    try:
        config = overlay(Config(), {path: data.draw(wild_values(fields[path])) for path in chosen})
    except ConfigError:
        return
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert from_config_dict(to_config_dict(config)) == config


def test_a_saved_config_with_an_unknown_field_is_refused_and_one_with_fewer_gets_defaults():
    saved = config_to_dict(Config(seed=3))
    del saved['model']['d_ff']
    assert config_from_dict(saved) == Config(seed=3)
    saved['model']['d_fff'] = 7
    with pytest.raises(ConfigError, match='model.d_fff .*did you mean model.d_ff'):
        config_from_dict(saved)


def test_a_config_dict_is_locked_and_typed():
    page = to_config_dict(Config())
    page.model.d_model = 258
    page.train.ema_decay = 0.5
    page.optimizer.schedule.warmup_steps = None
    page.optimizer.schedule.factor = 3
    config = from_config_dict(page)
    assert (config.model.d_model, config.train.ema_decay, config.optimizer.schedule.warmup_steps) == (258, 0.5, None)
    assert type(config.optimizer.schedule.factor) is float
    with pytest.raises(AttributeError, match='d_modle'):
        page.model.d_modle = 3
    with pytest.raises(TypeError):
        page.train.ema_decay = 'slow'
    page.model.d_model = True  # which a ConfigDict lets pass
    with pytest.raises(ConfigError, match='model.d_model is True'):
        from_config_dict(page)


def write_page(folder, *lines):
    path = folder / 'page.py'
    start = (
        'from transformer_jax.config import Config',
        'from transformer_jax.overlay import parse_arguments, to_config_dict',
        'def get_config(arg=None):',
        '    config = to_config_dict(Config())',
    )
    path.write_text('\n'.join([*start, *(f'    {line}' for line in lines), '    return config', '']))
    return path


def test_a_config_file_gets_its_argument(tmp_path):
    page = write_page(
        tmp_path, "arguments = parse_arguments(arg, width='8')", 'config.model.d_ff = int(arguments.width)'
    )
    assert load_config_file(f'{page}').model.d_ff == 8
    assert load_config_file(f'{page}:width=31').model.d_ff == 31
    with pytest.raises(ConfigError, match=r"unknown config argument 'widht=31'.*did you mean width"):
        load_config_file(f'{page}:widht=31')


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('config.model.d_modle = 256', 'no field config.d_modle .*did you mean model.d_model'),
        ('config.modle.d_model = 256', 'no field config.modle'),
        ('config.model.d_model = 256.5', 'd_model is set to 256.5; it must be int'),
        ("config.train.ema_decay = 'slow'", 'ema_decay is set to slow; it must be float'),
        ('config.model.d_model = None', 'config.model.d_model is None'),
        ('config.model.d_model = -3', 'config.model.d_model is -3; it must be at least 1'),
    ],
)
def test_a_mistake_in_a_config_file_is_named(tmp_path, line, message):
    page = write_page(tmp_path, line)
    with pytest.raises(ConfigError, match=f'page.py: .*{message}'):
        load_config_file(f'{page}')


def test_an_error_of_the_page_itself_keeps_its_own_words(tmp_path):
    with pytest.raises(AttributeError, match='has no attribute'):
        load_config_file(f'{write_page(tmp_path, "object().nothing")}')


def test_a_missing_config_file_is_named_with_its_neighbours(tmp_path):
    write_page(tmp_path)
    with pytest.raises(ConfigError, match=r'no config file .*pag\.py.*did you mean page'):
        load_config_file(f'{tmp_path}/pag.py')
    with pytest.raises(ConfigError, match='no config file'):
        load_config_file(f'{tmp_path}/page')


def test_arguments_are_read_by_name():
    assert parse_arguments(None, size='base').size == 'base'
    found = parse_arguments('folder=a=b/c,size=big', required=('folder',), size='base')
    assert (found.folder, found.size) == ('a=b/c', 'big')
    for text, message in (('size=big', 'needs folder'), ('folder', 'has no value'), ('folder=', 'needs folder')):
        with pytest.raises(ConfigError, match=message):
            parse_arguments(text, required=('folder',), size='base')


FREE = {path for path, field, _ in walk(Config()) if field.metadata.get('free')}
OTHER = {int: 7919, float: 0.0625, bool: None, str: 'something else', type(None): None}


def another_value(path):
    field = next(f for p, f, _ in walk(Config()) if p == path)
    value = read(Config(), path)
    kind = next(t for t in allowed_types(field) if t is not type(None))
    return (not value) if kind is bool else OTHER[kind]


@pytest.mark.parametrize('path', PATHS)
def test_each_fixed_field_that_differs_is_named_with_both_values_and_no_free_one(path):
    old, new = config_to_dict(Config()), config_to_dict(Config())
    section = new
    *groups, name = path.split('.')
    for group in groups:
        section = section[group]
    section[name] = another_value(path)
    expected = [] if path in FREE else [(f'config.{path}', read(Config(), path), section[name])]
    assert fixed_differences(old, new) == expected


def test_the_free_fields_are_those_that_change_no_result_of_a_step():
    assert {'train.steps', 'execution.unroll', 'model.attention.impl', 'logging.every_steps'} <= FREE
    fixed = {'seed', 'train.accumulation', 'data.batch_tokens', 'model.d_model', 'vocabulary.size', 'train.prng'}
    assert not FREE & fixed


def test_fields_that_only_one_version_knows():
    old, new = config_to_dict(Config()), config_to_dict(Config())
    del old['model']['d_ff']  # written before the field existed: it counts as the default
    assert fixed_differences(old, new) == []
    new['model']['d_ff'] = 31
    assert fixed_differences(old, new) == [('config.model.d_ff', ModelConfig().d_ff, 31)]
    old['model']['mystery'] = 5
    assert ('config.model.mystery', 5, None) in fixed_differences(old, new)


def test_languages_of_a_tfds_set_are_read_where_earlier_versions_kept_them():
    old = config_to_dict(overlay(Config(), {'data.source': 'tfds'}))
    old['data']['tfds'] |= {'source_language': 'fr', 'target_language': 'en'}
    read = config_from_dict(old)
    assert (read.source_language, read.target_language) == ('fr', 'en')
    assert fixed_differences(old, config_to_dict(read)) == []
    old['data']['source'] = 'grammar'
    assert config_from_dict(old) == overlay(Config(), {'data.source': 'grammar'})


def test_the_paper_is_the_default():
    assert apply(Config(), recipe='paper', size='base') == Config()


@pytest.mark.parametrize('name', [name for name in RECIPES if name != 'paper'])
def test_a_recipe_sets_every_field_that_any_recipe_sets(name):
    changed = apply(Config(), recipe=name)
    assert changed != Config()
    assert apply(changed, recipe='paper') == Config()
    assert RECIPES[name].keys() >= RECIPES['paper'].keys()


@pytest.mark.parametrize('name', [name for name in SIZES if name != 'base'])
def test_a_size_sets_every_field_that_any_size_sets(name):
    changed = apply(Config(), size=name)
    assert changed != Config()
    assert apply(changed, size='base') == Config()
    attention = changed.model.attention
    assert attention.num_heads * attention.head_dim == changed.model.d_model


def test_unknown_recipes_and_sizes_are_refused_with_the_choices():
    with pytest.raises(ConfigError, match="size is 'bigg'; it must be one of 'tiny', .*did you mean 'big'"):
        apply(Config(), size='bigg')
    with pytest.raises(ConfigError, match="recipe is 'nothing'; it must be one of 'paper'"):
        apply(Config(), recipe='nothing')


def test_configs_are_values():
    assert dataclasses.replace(Config(), seed=1) == overlay(Config(), {'seed': '1'})
    assert len({Config(), Config(seed=1), Config()}) == 2
