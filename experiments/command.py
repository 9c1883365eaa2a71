"""The command line that all experiments share: gin bindings, an output folder, a dry run."""
import contextlib
import itertools
import os
import re
import sys

from absl import app
from absl import flags
from absl import logging
import gin
from gin import config_parser
import jax

FLAGS = flags.FLAGS
flags.DEFINE_multi_string('gin_file', [], 'Configuration file; may be given several times.')
flags.DEFINE_string('output_dir', None, 'Folder for what the run writes (default: results/<run>).')
flags.DEFINE_bool('profile', False, 'Write a trace of the run for TensorBoard and Perfetto to <output_dir>/profile.')
flags.DEFINE_bool('dry_run', False, 'Print the resolved configuration and check it; compute nothing.')


def _split_bindings(argv):
  """['prog', '--gin.X=1', …] → (the other arguments, ['X = 1', …])."""
  rest, bindings = [], []
  for argument in argv:
    if argument.startswith('--gin.'):
      name, equals, value = argument[len('--gin.'):].partition('=')
      if not equals:
        raise UsageError(f'{argument}: a binding is written --gin.NAME=VALUE')
      bindings.append(f'{name} = {value}')
    else:
      rest.append(argument)
  return rest, bindings


def _located(message, bindings):
  """The message behind 'FILE, line N: ', where the last binding that it names is, unless the command line has that."""
  # gin names a macro that nothing sets, and shows the whole configuration, but not what uses it.
  unset = re.match(r"No bindings specified for '(\w+)/gin\.macro'", message)
  found = ''
  for statement in itertools.chain.from_iterable(map(_statements, FLAGS.gin_file)):
    name = f'{statement.selector.split(".")[-1]}' + (f'.{statement.arg_name}' if statement.arg_name else '/macro')
    here = f'{statement.location.filename}, line {statement.location.line_num}: '
    if unset and f'%{unset[1]}' in repr(statement.value):
      return f'{here}{name} uses the macro {unset[1]}, which nothing sets'
    if re.search(rf'\b{re.escape(name)}\b', message):
      found = '' if any(re.match(rf'([\w.]+[./])?{re.escape(name)} =', binding) for binding in bindings) else here
  return found + (f'the macro {unset[1]} is not set' if unset else message)


def _statements(path):
  """The bindings of a gin file and of those that it includes."""
  with open(path, encoding='utf-8') as file:
    for statement in config_parser.ConfigParser(file, gin.config.ParserDelegate()):
      if isinstance(statement, config_parser.IncludeStatement):
        yield from _statements(statement.filename)
      elif isinstance(statement, config_parser.BindingStatement):
        yield statement


class UsageError(Exception):
  """A mistake of the caller's, told in one line."""


def _keep_programs():
  """Compiled programs are kept in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR names another."""
  if jax.config.jax_compilation_cache_dir is None:
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
    folder = os.path.join(cache, 'speculative', 'programs')
    try:
      os.makedirs(folder, exist_ok=True)
    except OSError:
      return
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_compilation_cache_max_size', 2 << 30)  # bytes; the least recently used go


def _profile(output_dir):
  """Traces what is inside, on the device and in Python. Draft, verify, accept and commit are named scopes."""
  return jax.profiler.trace(os.path.join(output_dir, 'profile'), create_perfetto_trace=True)


def main(experiment, positional=None, keep_programs=True):
  """Parses the command line, binds gin, and calls `experiment(output_dir=…, dry_run=…)`.

  Other arguments are a mistake, unless `positional` names the keyword under which the experiment takes their list.
  `keep_programs`: JAX's persistent compilation cache.

  A mistake in the configuration ends the program with status 1 and one line, before anything is loaded.
  """
  try:
    rest, bindings = _split_bindings(sys.argv)
  except UsageError as e:
    sys.exit(f'error: {e}')

  def fail(error):
    sys.exit('error: ' + _located(str(error).split('\n')[0], bindings))  # gin adds where it was called from

  if keep_programs:
    _keep_programs()

  def run(argv):
    debug = FLAGS.verbosity > 0  # before it is set here
    logging.set_verbosity(logging.FATAL)  # gin logs what it raises
    more = {positional: argv[1:]} if positional else {}
    if len(argv) > 1 and not positional:
      sys.exit(f'error: unexpected argument {argv[1]!r}')
    for path in FLAGS.gin_file:
      if not os.path.isfile(path):
        sys.exit(f'error: --gin_file={path}: no such file')
    try:
      gin.parse_config_files_and_bindings(FLAGS.gin_file, bindings, finalize_config=False)
    except (ValueError, OSError, SyntaxError, ImportError) as e:  # they tell file and line
      sys.exit('error: ' + ' '.join(str(e).split()))
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it writes
    name = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    output_dir = os.path.expanduser(FLAGS.output_dir or os.path.join('results', name))
    try:
      gin.finalize()
      if FLAGS.dry_run:
        print(gin.config_str())
      with _profile(output_dir) if FLAGS.profile and not FLAGS.dry_run else contextlib.nullcontext():
        experiment(output_dir=output_dir, dry_run=FLAGS.dry_run, **more)
    except (UsageError, ValueError, FileNotFoundError, FileExistsError) as e:
      if debug:
        raise
      fail(e)
    except RuntimeError as e:
      if 'Required bindings' not in str(e):  # gin's words for a parameter that must be given
        raise
      fail(e)

  app.run(run, argv=rest)
