"""How old the weights may be that a group was generated with when it is trained on."""

from __future__ import annotations

from collections.abc import Iterable


def fits(versions: Iterable[int], *, next_version: int, batch: int, bound: int) -> bool:
    """Whether groups of these weight versions can all be trained on in time.

    ``next_version`` is that of the weights which the next step trains, ``batch`` the groups that a step takes. Taken
    oldest first, group i of n falls to step i // batch, which trains version next_version + i // batch; it is in time
    when that is at most ``bound`` versions after its own. No other order does better (earliest deadline first).
    """
    return all(next_version + place // batch - version <= bound for place, version in enumerate(sorted(versions)))
