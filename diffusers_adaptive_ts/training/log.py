"""The training log: one JSON object per line, flushed as it comes, cut back to a checkpoint on resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LOG_NAME = "training_log.jsonl"


class TrainingLog:
    """Appends rows to `training_log.jsonl`; only the main process writes.

    Args:
        folder: the run's output folder.
        enabled: False on all ranks but the first.
    """

    def __init__(self, folder: Path, enabled: bool = True) -> None:
        self.path = folder / LOG_NAME
        self._file = open(self.path, "a", encoding="utf-8") if enabled else None  # noqa: SIM115 (open for the run)

    def write(self, kind: str, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}, allow_nan=True) + "\n")
            self._file.flush()

    def position(self) -> int:
        """Bytes written; a checkpoint keeps it."""
        return 0 if self._file is None else self._file.tell()

    def cut_back(self, position: int) -> None:
        """Forget what was written after a checkpoint: those steps are done again."""
        if self._file is not None:
            if self.path.stat().st_size < position:
                raise ValueError(
                    f"{self.path} is shorter than when the checkpoint was written; it was replaced or edited. "
                    "Put the log back, or start a new run in another output_dir."
                )
            os.truncate(self.path, position)
            self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole rows; a last line that a killed run left unfinished is passed over."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                rows.append(json.loads(line))
            except ValueError:
                if line.endswith("\n"):
                    raise ValueError(f"{path} has a line that is not JSON: {line[:80]!r}") from None
    return rows
