"""Takes thousands of tasks that become ready together apart, so that the event loop stays responsive.

    ready tasks --take--> the first few of each round of the loop go on at once
                   |
                   +----> the others wait in a line, a few for each of the next rounds

When thousands of answers arrive in the same moment, or thousands of samples start, an event loop would otherwise work
through all of them before it looks at anything else: seconds in which no timeout fires and no other answer is read.
"""

from __future__ import annotations

import asyncio
from collections import deque

TURNS_A_ROUND = 16


class Turns:
    """Used from one event loop; may be built outside of it.

    if not turns.take():
        await turns.wait()
    """

    def __init__(self, a_round: int = TURNS_A_ROUND) -> None:
        self._a_round = a_round
        self._left = a_round
        self._line: deque[asyncio.Future[None]] = deque()
        self._renewal_is_due = False

    def take(self) -> bool:
        """Whether this round has a turn left; then it is taken."""
        if self._line or not self._left:
            return False
        self._left -= 1
        self._renew_soon()
        return True

    async def wait(self) -> None:
        """Until it is the caller's turn; first come, first served."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        self._renew_soon()
        await turn

    def _renew_soon(self) -> None:
        if not self._renewal_is_due:
            self._renewal_is_due = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        self._renewal_is_due = False
        self._left = self._a_round
        line = self._line
        while line and self._left:
            turn = line.popleft()
            if not turn.done():  # else its waiter was cancelled
                turn.set_result(None)
                self._left -= 1
        if line:
            self._renew_soon()
