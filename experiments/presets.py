"""Named experiments: functions that return the Config fields they set.

A docstring gives the command, the time it takes on two CPU cores, and the result to expect.
"""

from typing import Any, Callable

PRESETS: dict[str, Callable[[], dict[str, Any]]] = {}
