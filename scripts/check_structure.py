"""Checks the project's own rules: which package imports what, and how long a file may be.

The rules are the `structure:` sections of setup.cfg. Prints one line per fault, and exits 1 when
there is any.
"""

import ast
import configparser
from collections.abc import Iterator
from pathlib import Path
import sys

MAX_LINES = 400
FOLDERS = ('attn', 'experiments', 'tests', 'scripts')


def read_rules(root: Path) -> configparser.ConfigParser:
  """Returns the parsed setup.cfg; its keys here are paths, so they keep their case."""
  rules = configparser.ConfigParser(interpolation=None, delimiters=('=',))
  rules.optionxform = str  # type: ignore[assignment,method-assign]
  rules.read(root / 'setup.cfg')
  return rules


def imports(node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, int, bool]]:
  """Yields (top-level package, line, in a function?) of each absolute import under node."""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.Import):
      for alias in child.names:
        yield alias.name.partition('.')[0], child.lineno, lazy
    elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
      yield child.module.partition('.')[0], child.lineno, lazy
    is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    yield from imports(child, lazy or is_function)


def check_file(root: Path, path: Path, rules: configparser.ConfigParser) -> Iterator[str]:
  """Yields the faults of one Python file."""
  name = path.relative_to(root).as_posix()
  text = path.read_text(encoding='utf-8')
  lines = text.count('\n')
  if lines > MAX_LINES and not rules.get('structure:long_files', name, fallback=''):
    yield (f'{name}: {lines} lines, more than {MAX_LINES}; split it, or give the reason in '
           'setup.cfg [structure:long_files]')
  allowed = rules.get('structure:imports', name.partition('/')[0], fallback='').split()
  if not allowed:
    return
  lazily = rules.get('structure:lazy_imports', name, fallback='').split()
  try:
    tree = ast.parse(text, name)
  except SyntaxError as error:
    yield f'{name}:{error.lineno}: {error.msg}'
    return
  for package, line, lazy in imports(tree):
    if package in sys.stdlib_module_names or package in allowed or (lazy and package in lazily):
      continue
    yield f'{name}:{line}: imports {package}; here only the standard library, {", ".join(allowed)}'


def check(root: Path) -> list[str]:
  """Returns the faults of all Python files, and the reasons given for files that need none."""
  rules = read_rules(root)
  files = sorted(path for folder in FOLDERS for path in (root / folder).rglob('*.py'))
  faults = [fault for path in files for fault in check_file(root, path, rules)]
  for name in rules['structure:long_files'] if rules.has_section('structure:long_files') else ():
    path = root / name
    if not path.is_file() or path.read_text(encoding='utf-8').count('\n') <= MAX_LINES:
      faults.append(f'setup.cfg: {name} in [structure:long_files] is no longer a long file')
  return faults


def main() -> int:
  faults = check(Path(__file__).resolve().parent.parent)
  for fault in faults:
    print(fault)
  return 1 if faults else 0


if __name__ == '__main__':
  sys.exit(main())
