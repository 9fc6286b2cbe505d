"""Tensors encoded once and kept on disk: named by what they depend on, shared out between ranks, all or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import tqdm
from safetensors import SafetensorError
from safetensors.torch import save_file

INDEX_NAME = "index.json"
# Files are small enough to be encoded in memory and shared out between ranks.
_BYTES_PER_FILE = 64 * 2**20
logger = get_logger(__name__)
Content = TypeVar("Content")
# Files of each split in order, and the rows in each of them but the last; raises what `_DAMAGE` lists if they are bad.
Reader = Callable[[dict[str, list[Path]], int], Content]
# Split, rows and progress bar in; tensors by name out, a row for each row.
Encoder = Callable[[str, range, Any], dict[str, torch.Tensor]]
_DAMAGE = (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError)


@dataclass(frozen=True)
class DiskCache:
    """A folder of encoded rows.

    Args:
        parent: holds all caches of this kind.
        facts: all that the content depends on; other facts are another folder.
        what: the content's name in messages.
        unit: what a row encodes, for the progress bar.
        flag: the option that does without the cache, with what it does instead.
    """

    parent: Path
    facts: Mapping[str, Any]
    what: str
    unit: str
    flag: str

    @property
    def folder(self) -> Path:
        key = hashlib.sha256(json.dumps(dict(self.facts), sort_keys=True).encode()).hexdigest()[:16]
        return self.parent / key

    def read_or_write(
        self,
        counts: dict[str, int],
        read: Reader[Content],
        encode: Encoder,
        row_bytes: int,
        chunk: int,
        accelerator: Any,
    ) -> tuple[Content, str]:
        """What `read` makes of the files, encoded now or found from before; and which of the two, for the log.

        Args:
            counts: rows of each split.
            row_bytes: what a row takes at most.
            chunk: rows that are encoded together; a file holds a multiple of it.
        """
        content, note = self._read(counts, read), f"{self.what} reused from {self.folder}"
        # All ranks must take the same way, also where one has just seen the files of another.
        if not accelerator.gather(torch.tensor([int(content is not None)], device=accelerator.device)).all():
            rows_per_file = max(1, _BYTES_PER_FILE // (row_bytes * chunk)) * chunk
            self._write(counts, encode, row_bytes, rows_per_file, accelerator)
            content, note = self._read(counts, read), f"{self.what} encoded once into {self.folder}"
            if content is None:
                raise RuntimeError(
                    f"The {self.what} just written to {self.folder} cannot be read. Is the disk full or failing?"
                )
        return content, note

    def _read(self, counts: dict[str, int], read: Reader[Content]) -> Content | None:
        """None when there is no complete cache."""
        try:
            index = json.loads((self.folder / INDEX_NAME).read_text(encoding="utf-8"))
            files = {name: sorted(self.folder.glob(f"{name}-*.safetensors")) for name in counts}
            return read(files, index["rows_per_file"])
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            logger.warning(
                "The cached %s in %s are damaged (%s) and are encoded again.", self.what, self.folder, error
            )
            return None

    def _write(
        self, counts: dict[str, int], encode: Encoder, row_bytes: int, rows_per_file: int, accelerator: Any
    ) -> None:
        """Encode every row into a folder of another name, which takes its own only when all is there."""
        folder = self.folder
        partial = folder.with_name(f".{folder.name}.partial")
        if accelerator.is_main_process:
            self.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            self._check_space(row_bytes * sum(counts.values()))
            partial.mkdir()
        accelerator.wait_for_everyone()
        parts = [
            (name, number, range(start, min(start + rows_per_file, count)))
            for name, count in counts.items()
            for number, start in enumerate(range(0, count, rows_per_file))
        ]
        mine = parts[accelerator.process_index :: accelerator.num_processes]
        total = sum(len(rows) for _, _, rows in mine)
        with tqdm(total=total, desc=f"encoding {self.what}", unit=f" {self.unit}", leave=False) as bar:
            for name, number, rows in mine:
                save_file(encode(name, rows, bar), partial / f"{name}-{number:06d}.safetensors")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            index = {"rows_per_file": rows_per_file, **self.facts}
            (partial / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")
            os.rename(partial, folder)
        accelerator.wait_for_everyone()

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.parent).free
        if needed > 0.95 * free:
            raise ValueError(
                f"The {self.what} take {needed / 1e9:.1f} GB, but {self.parent} has {free / 1e9:.1f} GB free. "
                f"Give an --output_dir with more room, or {self.flag}."
            )


def take_rows(parts: Sequence[torch.Tensor], rows_per_part: int, index: torch.Tensor) -> torch.Tensor:
    """`(B, ...)` rows by number `(B,)` of tensors end to end, all but the last of which have `rows_per_part`.

    Example:
        >>> take_rows([torch.tensor([5, 6]), torch.tensor([7])], 2, torch.tensor([2, 0]))
        tensor([7, 5])
    """
    if len(parts) == 1 or len(index) == 0:
        return parts[0].index_select(0, index)
    places = (divmod(number, rows_per_part) for number in index.tolist())
    return torch.stack([parts[part][row] for part, row in places])
