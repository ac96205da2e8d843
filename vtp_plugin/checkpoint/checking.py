"""Checks of pieces beside their reading: a thread hashes them while torch makes tensors of them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from vtp_plugin.checkpoint.archive import Extent
from vtp_plugin.checkpoint.files import way_out
from vtp_plugin.checkpoint.manifest import Manifest, problem_of_piece
from vtp_plugin.errors import ConfigError


class PieceChecks:
    """Checks pieces until the block ends; then it waits for them, and raises if one has changed.

    Args:
        folder: of the checkpoint.
        manifest: of it.

    Raises:
        ConfigError: at the end, in the place of any other error.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._found: dict[Extent, Future[tuple[str, ...]]] = {}
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> PieceChecks:
        return self

    def begin(self, extent: Extent) -> None:
        """Check a piece, once."""
        if extent not in self._manifest.digests:  # it was hashed with all of its file
            extent = Extent(extent.file, 0, self._manifest.sizes.get(extent.file, 0))
        if extent not in self._found:
            self._found[extent] = self._thread.submit(self._check, extent)

    def _check(self, extent: Extent) -> tuple[str, ...]:
        if extent not in self._manifest.digests:
            return (f"{self._folder / extent.file} is not in the manifest",)
        return tuple(problem_of_piece(self._folder, self._manifest, extent))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        for problem in (text for each in self._found.values() for text in each.result()):
            raise ConfigError(
                f"{problem}; without it this checkpoint cannot be loaded; {way_out(self._folder)}"
            ) from error
