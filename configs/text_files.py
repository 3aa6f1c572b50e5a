"""Your own parallel text: copy this page, or use it as it is.

Data:      a folder with {train,valid,test}.SOURCE and {train,valid,test}.TARGET, one sentence a line, UTF-8; line n of
           both belong together. Compressed files end in .gz: change the names below. One file a split with
           `source TAB target` lines works too: set train_tsv, validation_tsv and test_tsv instead.
Command:   transformer-jax train --config=configs/text_files.py:folder=PATH,source=en,target=de --run runs/mine
           transformer-jax translate --run runs/mine --input new.en --output new.de
Size:      mini (3+3 layers, d_model 256) suits up to some 100,000 pairs; size=base is the paper's, for millions
Score:     printed at the end, and by: transformer-jax evaluate --run runs/mine --split test
"""

from ml_collections import ConfigDict

from transformer_jax.config import Config
from transformer_jax.overlay import parse_arguments, to_config_dict
from transformer_jax.recipes import apply


def get_config(arg: str | None = None) -> ConfigDict:
    arguments = parse_arguments(arg, required=('folder', 'source', 'target'), size='mini', recipe='paper')
    config = to_config_dict(apply(Config(), size=arguments.size, recipe=arguments.recipe))
    config.source_language = arguments.source
    config.target_language = arguments.target

    config.data.source = 'text_files'
    files = config.data.text_files
    files.train_source = f'{arguments.folder}/train.{arguments.source}'
    files.train_target = f'{arguments.folder}/train.{arguments.target}'
    files.validation_source = f'{arguments.folder}/valid.{arguments.source}'
    files.validation_target = f'{arguments.folder}/valid.{arguments.target}'
    files.test_source = f'{arguments.folder}/test.{arguments.source}'
    files.test_target = f'{arguments.folder}/test.{arguments.target}'
    config.vocabulary.size = 8000  # both languages together; lower it for a small corpus
    config.data.batch_tokens = 4096  # lower it when memory is short, raise it on a GPU

    config.model.dropout_rate = 0.2  # the less text, the more
    config.optimizer.schedule.warmup_steps = 2000
    config.train.steps = 20_000

    config.evaluation.every_steps = 1000
    config.evaluation.patience = 5  # stops after 5 evaluations without a better BLEU
    config.checkpoint.every_steps = 1000
    return config
