"""One run of a comparison in a process of its own, on its share of the cores, while the comparison
lives: `python -m experiments.worker CORES PARENT --task=...`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
  """Trains with the flags behind the cores, 0,1 or -, and the parent's process id."""
  _, cores, parent, *options = argv
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
      return 1
    os.sched_setaffinity(0, set(map(int, cores.split(','))))  # before jax counts them
  from experiments import train
  return train.main(['train', *options])


if __name__ == '__main__':
  sys.exit(main(sys.argv))
