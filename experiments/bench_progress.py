"""Says on stderr where a long measurement stands: one line that changes at a terminal, plain lines
elsewhere.
"""

import shutil
import sys
import time
from typing import TextIO


class Progress:
  """Counts work, in any unit that is about proportional to time, and estimates what is left."""

  def __init__(self, cells: int, work: float, stream: TextIO | None = None):
    """cells: how many there are. work: of all of them."""
    self._stream = sys.stderr if stream is None else stream
    self._cells, self._work = cells, work
    self._cell, self._done, self._pending = 0, 0.0, 0.0
    self._start = time.monotonic()

  def cell(self, what: str, work: float) -> None:
    """A new cell begins, whose preparation takes so much work."""
    self._cell += 1
    self._begin(work)
    self._show(f'[{self._cell}/{self._cells}] {what}', True)

  def turn(self, what: str, work: float, plain: bool = False) -> None:
    """A timed turn begins; plain: worth a line of its own where lines do not change."""
    self._begin(work)
    self._show(f'[{self._cell}/{self._cells}] {what}', plain)

  def skip(self, work: float) -> None:
    """Work that will not be done after all."""
    self._work -= work

  def end(self) -> None:
    """Clears the line at a terminal."""
    if self._stream.isatty():
      self._stream.write('\r\x1b[K')
      self._stream.flush()

  def _begin(self, work: float) -> None:
    self._done, self._pending = self._done + self._pending, work

  def _left(self) -> str:
    if not self._done or self._work <= self._done:
      return ''
    elapsed = time.monotonic() - self._start
    seconds = round(elapsed * (self._work - self._done) / self._done)
    minutes, seconds = divmod(seconds, 60)
    return f', about {minutes} min {seconds:02} s left'

  def _show(self, what: str, plain: bool) -> None:
    line = what + self._left()
    if self._stream.isatty():
      width = shutil.get_terminal_size().columns - 1
      self._stream.write(f'\r\x1b[K{line[:width]}')
    elif plain:
      self._stream.write(f'{line}\n')
    self._stream.flush()
