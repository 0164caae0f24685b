"""Runs the conformance tests and counts: rows x contract points x (forward, gradient).

    python -m tests.conformance_count            # arguments are pytest's: -n 2, -k performer, ...

Each test notes which point of which row it ran, and whether it compared numbers or asserted that
the row refuses the point with NotImplementedError. Nothing is skipped; were a test skipped, it
would be listed with its reason.
"""

import collections
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent


class Counter:
  """A pytest plugin that gathers what tests noted under 'contract'."""

  def __init__(self):
    self.cells: dict[tuple[str, str, str], str] = {}
    self.skipped: list[str] = []
    self.failed: list[str] = []

  def pytest_runtest_logreport(self, report) -> None:
    if report.skipped:
      self.skipped.append(f'{report.nodeid}: {report.longrepr}')
    elif report.failed:
      self.failed.append(report.nodeid)
    elif report.when == 'call':
      for name, noted in report.user_properties:
        if name == 'contract':
          row, point, direction, outcome = noted
          self.cells[row, point, direction] = outcome

  def summary(self) -> list[str]:
    points = collections.defaultdict(lambda: collections.Counter())
    for (_, point, direction), outcome in self.cells.items():
      points[point.split(' {')[0]][direction, outcome] += 1
    lines = [
        f'{"contract point":52} {"forward":>18} {"gradient":>18}',
        f'{"":52}' + 2 * '   compared/refused'
    ]
    for point in sorted(points):
      counts = [
          f'{points[point][direction, "compared"]:>9}/{points[point][direction, "refused"]}'
          for direction in ('forward', 'gradient')
      ]
      lines.append(f'{point:52} {counts[0]:>18} {counts[1]:>18}')
    rows = sorted({row for row, _, _ in self.cells})
    total = collections.Counter(self.cells.values())
    lines += [
        '', f'{len(rows)} rows: {", ".join(rows)}', f'{len(points)} contract points',
        f'{len(self.cells)} cells (row x point x direction): {total["compared"]} compared, '
        f'{total["refused"]} refused by name',
        f'{len(self.skipped)} skipped, {len(self.failed)} failed'
    ]
    return lines + [f'skipped: {line}' for line in self.skipped
                   ] + [f'failed: {line}' for line in self.failed]


def main(arguments: list[str]) -> int:
  counter = Counter()
  modules = sorted(str(path) for path in FOLDER.glob('conformance_*test.py'))
  status = pytest.main(['-q', '--all', *modules, *arguments], plugins=[counter])
  print('\n'.join(counter.summary()))
  return int(status)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
