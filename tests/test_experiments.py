"""The experiments' command lines: configuration errors in one line, generate and its trace."""
import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import command
from experiments import package
import speculative
from speculative.drafters import ngram

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(*arguments, text=None):
  return subprocess.run([sys.executable, '-m', *arguments], cwd=ROOT, capture_output=True, text=True, input=text,
                        env=os.environ | {'JAX_PLATFORMS': 'cpu'}, check=False)


@pytest.mark.parametrize('binding,named', [
    ('--gin.alpha_settings.tokenz=3', 'tokenz'),
    ('--gin.no_such_thing.x=3', 'no_such_thing'),
    ('--gin.alpha_settings.tokens', 'NAME=VALUE'),
    ('--gin_file=configs/runs/missing.gin', 'missing.gin'),
    ("--gin.zoo.target='nowhere'", 'zoo.drafts'),
    ('stray', 'stray')])
def test_a_mistake_in_the_configuration_is_one_line(binding, named):
  result = run('experiments.reproduce', binding)
  assert result.returncode == 1
  assert named in result.stderr
  assert result.stderr.startswith('error: ') and len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize('text,named', [
    ("zoo.more = ('oracle',)", 'line 2: zoo.more: oracle'),
    ("zoo.target = %TARGET", 'line 2: zoo.target uses the macro TARGET'),
    ("TARGET = %gin.REQUIRED\nzoo.target = %TARGET", 'line 2: TARGET/macro.value'),
    ("zoo:\n  drafts = {'small': 'nowhere'}\n  texts = {'ende': 'x'}\n  target = '.'", "line 3: zoo.drafts['small'] ="),
    ("zoo.targets = 'x'", 'line 2 zoo.targets'), ('import no.such.module', 'line 2 import no.such.module'),
    ("include 'nowhere.gin'", "line 2 include 'nowhere.gin'")])
def test_a_mistake_in_a_file_names_it(text, named, tmp_path):
  (tmp_path / 'inner.gin').write_text(f'# mine\n{text}\n')
  (tmp_path / 'my.gin').write_text(f"include '{tmp_path}/inner.gin'\n")
  result = run('experiments.reproduce', f'--gin_file={tmp_path}/my.gin')
  assert result.returncode == 1
  assert 'inner.gin' in result.stderr and named in result.stderr
  assert result.stderr.startswith('error: ') and len(result.stderr.strip().splitlines()) == 1


def test_the_command_line_comes_after_the_files(tmp_path):
  (tmp_path / 'my.gin').write_text("zoo.more = ('oracle',)\n")
  result = run('experiments.reproduce', f'--gin_file={tmp_path}/my.gin', "--gin.zoo.more=('augury',)")
  assert result.stderr.startswith('error: zoo.more: augury')


def test_models_of_another_vocabulary_are_not_packaged(tmp_path):
  """Data built anew, when the distribution's indexes have changed, have another vocabulary: the models would read it wrong."""
  (tmp_path / 'data').mkdir()
  (tmp_path / 'data' / 'spiece.model').write_bytes(b'new')
  for name, run_name in package.RUNS.items():
    folder = tmp_path / 'runs' / run_name
    (folder / 'model').mkdir(parents=True)
    (folder / 'model' / 'spiece.model').write_bytes(b'old' if name == 'draft_base' else b'new')
    (folder / 'results.jsonl').touch()
  result = run('experiments.package', f"--gin.package.data_dir='{tmp_path}/data'", f"--gin.package.runs_dir='{tmp_path}/runs'")
  assert result.returncode == 1 and result.stderr.startswith('error: ')
  assert f'{package.RUNS["draft_base"]}/model/spiece.model is not the vocabulary of' in result.stderr


@pytest.mark.parametrize('file', sorted(
    name for name in os.listdir(os.path.join(ROOT, 'configs', 'runs')) if name.startswith('reproduce')))
def test_dry_run(file, tmp_path):
  result = run('experiments.reproduce', f'--gin_file=configs/runs/{file}', '--dry_run', f'--output_dir={tmp_path}/out')
  assert result.returncode == 0, result.stderr
  assert 'alpha_settings' in result.stdout
  assert not os.path.exists(f'{tmp_path}/out')


@pytest.mark.slow
def test_generate_shows_rounds_and_speed(tmp_path):
  result = run('experiments.generate', '--trace', f'--trace_html={tmp_path}/trace.html', '--gin.generate.passes=1',
               '--gin.generate.timeline_gammas=(2,)', 'translate English to German: A small text editor')
  assert result.returncode == 0, result.stderr
  assert 'accepted' in result.stdout and 'replaced' in result.stdout
  assert 'tokens/s against' in result.stderr
  assert os.listdir(tmp_path) == ['trace.html']
  page = (tmp_path / 'trace.html').read_text('utf-8')
  assert 'translate English to German: A small text editor' in page and result.stdout.splitlines()[-1] in page
  assert 'data:image/png;base64,' in page


def test_generate_writes_nothing_in_a_dry_run(tmp_path):
  result = run('experiments.generate', f'--trace_html={tmp_path}/trace.html', '--dry_run', 'text')
  assert result.returncode == 0, result.stderr
  assert not os.listdir(tmp_path)


@pytest.mark.parametrize('arguments,named', [
    (['--gin.generate.gamma=0', 'text'], 'gamma = 0'),
    (['--gin.generate.temperature=-1', 'text'], 'temperature = -1'),
    (['--gin.generate.top_p=0.0', 'text'], 'top_p = 0.0'),
    (["--gin.generate.draft='huge'", 'text'], "'huge'"),
    (['--file=no/such/file'], 'no/such/file'),
    (['--trace_html=no/such/trace.html', 'text'], 'no/such/trace.html: No such file or directory'),
    (['--trace_html=tests', 'text'], 'tests: is a folder'),
    (['--trace_html=/dev/full/trace.html', 'text'], 'trace.html: Not a directory'),
    (['--trace_html=trace.html', '--gin.generate.draft=None', 'text'], 'draft must not be None'),
    (['--trace_html=trace.html', '--gin.generate.timeline_gammas=(0,)', 'text'], 'gamma = 0'),
    ([''], 'text 0 is empty')])
def test_generate_refuses_bad_input(arguments, named):
  result = run('experiments.generate', *arguments)
  assert result.returncode == 1
  assert named in result.stderr
  assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_counts_of_tokens_and_of_texts_are_the_same(tmp_path):
  """The packaged references counted from text, and from their token ids."""
  vocabulary = speculative.load_pretrained().vocabulary
  texts = [('in', 'ein Werkzeug'), ('in', 'ein Spiel')]
  (tmp_path / 'texts.tsv').write_text(''.join('\t'.join(pair) + '\n' for pair in texts))
  (tmp_path / 'tokens.txt').write_text(
      ''.join(' '.join(map(str, vocabulary.encode(text))) + ' 1\n' for _, text in texts))
  spiece = 'speculative/pretrained/spiece.model'
  for name, bindings in (('a', [f"--gin.ngrams.texts='{tmp_path}/texts.tsv'", f"--gin.ngrams.vocabulary='{spiece}'"]),
                         ('b', [f"--gin.ngrams.tokens='{tmp_path}/tokens.txt'", '--gin.ngrams.vocab_size=4000'])):
    result = run('experiments.ngrams', *bindings, f'--output_dir={tmp_path}/{name}')
    assert result.returncode == 0, result.stderr
  a, b = (ngram.load(tmp_path / name / 'counts.npz') for name in 'ab')
  for field in dataclasses.fields(a):
    np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


def test_a_t5x_checkpoint_becomes_hugging_face_s(tmp_path):
  source, spiece = 'tests/data/t5x/t5_v1_1', 'tests/data/vocabulary/spiece.model'
  arguments = ['experiments.convert', f"--gin.convert.source='{source}'", f"--gin.convert.vocabulary='{spiece}'",
               '--gin.convert.extra_ids=8', f'--output_dir={tmp_path}/out']
  result = run(*arguments)
  assert result.returncode == 0, result.stderr
  model = speculative.load_model(tmp_path / 'out', 'float32')
  assert model.vocabulary.vocab_size == 128
  jax.tree.map(np.testing.assert_array_equal, model.params, speculative.load_model(source, 'float32').params)
  result = run(*arguments)
  assert result.returncode == 1 and 'overwrite=True' in result.stderr and len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize('experiment,arguments,named', [
    ('ngrams', [], 'ngrams.tokens'), ('package', [], 'data_dir'), ('convert', [], 'source'),
    ('generate', ["--gin.generate.task='ende '", 'text'], "task = 'ende '"),
    ('ngrams', ["--gin.ngrams.tokens='missing'", '--gin.ngrams.vocab_size=9'], 'missing'),
    ('alpha', ["--gin.zoo.more=('copying', 'oracle')"], 'oracle')])
def test_experiments_refuse_bad_input(experiment, arguments, named):
  result = run(f'experiments.{experiment}', *arguments)
  assert result.returncode == 1 and named in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_programs_are_kept_in_the_users_cache(tmp_path, monkeypatch):
  """So that a second run compiles nothing, unless JAX is told of another folder or the cache cannot be written."""
  update = []
  monkeypatch.setattr(command.jax.config, 'update', lambda *setting: update.append(setting))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  command._keep_programs()
  folder = tmp_path / 'cache' / 'speculative' / 'programs'
  assert folder.is_dir() and ('jax_compilation_cache_dir', str(folder)) in update
  update.clear()
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  command._keep_programs()
  assert not update


@pytest.mark.slow
def test_profile(tmp_path):
  """A trace for TensorBoard and one for Perfetto."""
  result = run('experiments.theory', '--profile', f'--output_dir={tmp_path}')
  assert result.returncode == 0, result.stderr
  names = [name for _, _, files in os.walk(tmp_path / 'profile') for name in files]
  assert any(name.endswith('.xplane.pb') for name in names) and 'perfetto_trace.json.gz' in names
