"""The command line that all experiments share: gin bindings, an output folder, a dry run."""
import os
import sys

from absl import app
from absl import flags
from absl import logging
import gin

FLAGS = flags.FLAGS
flags.DEFINE_multi_string('gin_file', [], 'Configuration file; may be given several times.')
flags.DEFINE_string('output_dir', None, 'Folder for what the run writes (default: results/<run>).')
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


class UsageError(Exception):
  """A mistake of the caller's, told in one line."""


def main(experiment, positional=None):
  """Parses the command line, binds gin, and calls `experiment(output_dir=…, dry_run=…)`.

  Other arguments are a mistake, unless `positional` names the keyword under which the experiment takes their list.

  A mistake in the configuration ends the program with status 1 and one line, before anything is loaded.
  """
  try:
    rest, bindings = _split_bindings(sys.argv)
  except UsageError as e:
    sys.exit(f'error: {e}')

  def run(argv):
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it writes
    more = {positional: argv[1:]} if positional else {}
    if len(argv) > 1 and not positional:
      sys.exit(f'error: unexpected argument {argv[1]!r}')
    for path in FLAGS.gin_file:
      if not os.path.isfile(path):
        sys.exit(f'error: --gin_file={path}: no such file')
    try:
      gin.parse_config_files_and_bindings(FLAGS.gin_file, bindings)
    except (ValueError, OSError, SyntaxError) as e:
      sys.exit('error: ' + ' '.join(str(e).split()))
    name = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    output_dir = os.path.expanduser(FLAGS.output_dir or os.path.join('results', name))
    if FLAGS.dry_run:
      print(gin.config_str())
    try:
      experiment(output_dir=output_dir, dry_run=FLAGS.dry_run, **more)
    except (UsageError, ValueError, FileNotFoundError, FileExistsError) as e:
      if FLAGS.verbosity > 0:
        raise
      sys.exit('error: ' + str(e).split('\n')[0])  # gin adds where it was called from
    except RuntimeError as e:
      if 'Required bindings' not in str(e):  # gin's words for a parameter that must be given
        raise
      sys.exit('error: ' + str(e).split('\n')[0])

  app.run(run, argv=rest)
