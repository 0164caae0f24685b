"""What the devices of a compiled program send each other."""

import math
import re
from typing import Any


def sent(program: Any) -> list[tuple[str, int, list[tuple[int, int]]]]:
  """(kind, numbers sent, pairs of devices) of each collective in a program."""
  found = []
  for line in program.as_text().splitlines():
    match = re.search(r'= (.*?) (collective-permute|all-\w+|reduce-scatter)(-start)?\(', line)
    if match:
      shapes = re.findall(r'\w+\[([\d,]*)\]', match[1])
      sizes = [math.prod(int(n) for n in shape.split(',') if n) for shape in shapes]
      given = re.search(r'source_target_pairs=\{(.*?)\}\}?,', line)
      words = re.findall(r'(\d+),(\d+)', given[1]) if given else []
      found.append((match[2], max(sizes), [(int(a), int(b)) for a, b in words]))
  return found


def largest(program: Any) -> dict[str, int]:
  """The most numbers that a collective of each kind sends."""
  found: dict[str, int] = {}
  for kind, numbers, _ in sent(program):
    found[kind] = max(numbers, found.get(kind, 0))
  return found
