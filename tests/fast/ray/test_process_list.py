from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from miles.ray.process_list import FILE, ProcessList

if TYPE_CHECKING:
    from pathlib import Path


def test_the_file_has_everything_learned_so_far_and_the_newest_of_each(tmp_path: Path) -> None:
    processes = ProcessList(tmp_path)
    assert not (tmp_path / FILE).exists()
    processes.learn({"router": 2, "engine-0": 3})
    processes.learn({"engine-0": 4})
    assert json.loads((tmp_path / FILE).read_text()) == {"driver": os.getpid(), "router": 2, "engine-0": 4}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
