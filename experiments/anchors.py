"""Published results a comparison can be held against: what was reached, where, and who says so."""

from collections.abc import Callable
from typing import Any, NamedTuple

from experiments.config import Config
from experiments.parts import resolved


class Anchor(NamedTuple):
  """A published accuracy.

  Attributes:
    fits: whether a resolved configuration is what was published, tasks and models alike.
    accuracy: that was published, of a resolved configuration.
    at_least: whether more is as good.
    within: what counts as reproduced.
    source: paper and section.
  """
  fits: Callable[[dict[str, Any]], bool]
  accuracy: Callable[[dict[str, Any]], float]
  at_least: bool
  within: float
  source: str


_ZOOLOGY = 'Arora et al. 2023, Zoology, arxiv 2312.04927'
_H3 = 'Fu et al. 2022, H3, section 3.1, arxiv 2212.14052'
_LRA = 'Tay et al. 2020, Long Range Arena, table of its repository, arxiv 2011.04006'
_LISTOPS = {
    'vanilla': 0.3637, 'blockwise': 0.3637, 'local': 0.1582, 'linformer': 0.3570,
    'performer': 0.1801, 'strided': 0.1707, 'longformer': 0.3563, 'bigbird': 0.3605
}  # yapf: disable
_DENSE = ('vanilla', 'blockwise')


def _is(task: str, attention: tuple[str, ...] = _DENSE, **least: int) -> Callable[[dict], bool]:
  """Whether a configuration is of a task and variant, with fields of at least these values."""

  def fits(values: dict[str, Any]) -> bool:
    return (values['task'] == task and values.get('attention') in attention and
            all(values.get(name, 0) >= value for name, value in least.items()))

  return fits


ANCHORS = (
    Anchor(_is('mqar', num_layers=2), lambda values: 1., True, 0.01, _ZOOLOGY),
    Anchor(lambda values: _is('mqar')(values) and values['num_layers'] == 1,
           lambda values: 1 / values['num_pairs'], False, 0.05, _ZOOLOGY),
    Anchor(_is('induction', num_layers=2), lambda values: 0.97, True, 0.01, _H3),
    Anchor(_is('associative_recall', num_layers=2), lambda values: 0.97, True, 0.01, _H3),
    Anchor(_is('listops', tuple(_LISTOPS), length=1999),
           lambda values: _LISTOPS[values['attention']], False, 0.02, _LRA),
)


def anchor(config: Config) -> Anchor | None:
  """The published result for a configuration, or None."""
  values = resolved(config)
  return next((found for found in ANCHORS if found.fits(values)), None)


def verdict(config: Config, accuracy: float) -> tuple[float | None, str]:
  """The published accuracy, and how near to it a mean is: reproduced, near (within five times what
  counts as that), not, or no anchor.
  """
  found = anchor(config)
  if found is None:
    return None, 'no anchor'
  wanted = found.accuracy(resolved(config))
  away = max(wanted - accuracy, 0.) if found.at_least else abs(wanted - accuracy)
  if away <= found.within:
    return wanted, 'reproduced'
  return wanted, 'near' if away <= 5 * found.within else 'not'
