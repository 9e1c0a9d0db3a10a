"""How often the network daemon has died lately: how long to wait before the next one, and what `status` says of it.

Time is an argument; nothing is started here.
"""

from noloco_node.views.views import Health

LATELY_S = 600.0
"""A death is held against p2pd for so long."""
MAX_WAIT_S = 30.0
MANY = 3
"""From so many deaths on it is no accident, and `status` goes on telling after the last one."""


class NetworkOutages:
    def __init__(self) -> None:
        self._deaths: list[float] = []
        self._how: str | None = None

    def died(self, how: str, now: float) -> float:
        """Returns how many seconds to wait before another start: none at first, then longer each time."""
        self._how = how
        self._deaths = [*self._lately(now), now]
        return 0.0 if len(self._deaths) == 1 else min(2.0 ** (len(self._deaths) - 2), MAX_WAIT_S)

    def over(self) -> None:
        self._how = None

    def health(self, now: float) -> tuple[Health, ...]:
        deaths = len(self._lately(now))
        often = f", for the {deaths}{'rd' if deaths == MANY else 'th'} time in 10 minutes" if deaths >= MANY else ""
        if self._how:
            text = f"network: degraded, {self._how}{often}"
            return (Health("error", text, "it is being started again, and training goes on alone meanwhile"),)
        if deaths >= MANY:
            text = f"network: p2pd died {deaths} times in 10 minutes"
            return (Health("warning", text, "see node.log; is this machine short of memory?"),)
        return ()

    def _lately(self, now: float) -> list[float]:
        return [death for death in self._deaths if now - death < LATELY_S]
