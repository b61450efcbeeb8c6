"""Weight versions are labels with an order.

Whole numbers and texts of digits compare by value. Any other label ("default", a hash) has the order in which the
trainer published it; one that was never published has none, and so no age.
"""

from __future__ import annotations

from typing import Any

VersionLabel = int | str

_REMEMBERED = 4096


def version_number(label: object) -> int | None:
    """The number that a label is, None where it is not one: 7 and "7" are, "default", "" and True are not."""
    if isinstance(label, int) and not isinstance(label, bool):
        return label
    if isinstance(label, str) and label.isascii() and label.isdigit():
        return int(label)
    return None


class WeightVersions:
    """What the trainer has published, and how old a label is against that.

    `serial` counts changes of the current version. The last few thousand labels are remembered.
    """

    def __init__(self) -> None:
        self.current: VersionLabel | None = None
        self.serial = 0
        self._published: dict[VersionLabel, int] = {}  # label -> the serial at which it became the current one

    def publish(self, label: VersionLabel) -> bool:
        """The trainer's weights have this label now. Whether that is a change."""
        label = _plain(label)
        if label == self.current:
            return False
        self.serial += 1
        self.current = label
        self._published.pop(label, None)
        self._published[label] = self.serial
        if len(self._published) > _REMEMBERED:
            del self._published[next(iter(self._published))]
        return True

    def is_newer(self, label: VersionLabel) -> bool:
        """Whether a label that arrives late belongs after the current one; false only where both are numbers that say
        otherwise, or it was published before."""
        current, number = version_number(self.current), version_number(label)
        if current is not None and number is not None:
            return number > current
        return self.current is None or _plain(label) not in self._published

    def age(self, label: object, current: VersionLabel | None = None) -> int | None:
        """Versions from `label` to the current one (or to `current`, where given), 0 for newer ones; None where that
        cannot be told."""
        against = self.current if current is None else current
        here, there = version_number(against), version_number(label)
        if here is not None and there is not None:
            return max(0, here - there)
        since = self._published.get(_plain(label))
        until = None if against is None else self._published.get(_plain(against))
        return None if since is None or until is None else max(0, until - since)

    def state_dict(self) -> dict[str, Any]:
        return {"current": self.current, "published": list(self._published)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._published = {label: i + 1 for i, label in enumerate(state["published"])}
        self.current = state["current"]
        self.serial = len(self._published)


def _plain(label: Any) -> VersionLabel:
    """A number for what is one, else the label itself: 7 and "7" are one version."""
    number = version_number(label)
    return label if number is None else number
