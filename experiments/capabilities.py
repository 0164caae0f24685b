"""Prints the README's tables of capabilities and of costs, derived from attn.VARIANTS:
`python -m experiments.capabilities`.
"""

import attn


def table() -> str:
  """A Markdown table: a line per variant, a column per capability, `yes` or `-`.

  Raises:
    ValueError: a variant names a capability that attn does not describe.
  """
  lines = [['variant', *attn.CAPABILITIES.values()], ['---', *[':-:'] * len(attn.CAPABILITIES)]]
  for name, variant in attn.VARIANTS.items():
    unknown = sorted(variant.supports - set(attn.CAPABILITIES))
    if unknown:
      raise ValueError(
          f'{name} supports {unknown}, which are not among {sorted(attn.CAPABILITIES)}')
    lines.append([name, *['yes' if c in variant.supports else '-' for c in attn.CAPABILITIES]])
  return _markdown(lines)


def costs() -> str:
  """A Markdown table: each variant's function, cost and paper."""
  lines = [['variant', 'function', 'cost', 'paper'], ['---'] * 4]
  for name, variant in attn.VARIANTS.items():
    paper, address = variant.source.rsplit(', ', 1)
    function = f'`attn.{variant.attention.__name__}`'
    lines.append([name, function, variant.cost, f'[{paper}]({address})'])
  return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
  return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)


if __name__ == '__main__':
  print(f'{table()}\n\n{costs()}')
