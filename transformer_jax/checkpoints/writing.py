"""The steps by which a folder of arrays becomes visible: arrays, digests, manifest, rename; in that order."""

import asyncio
import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from transformer_jax import files
from transformer_jax.checkpoints import arrays, digests
from transformer_jax.checkpoints.run_folder import versions

_operations = itertools.count()


class Writing:
    """One folder being written. Every process of the run makes and finishes it alike; process 0 writes the manifest.

    Making it checks the arrays, copies them to the host and starts writing; the arrays may be donated afterwards.
    """

    def __init__(self, final: epath.Path, parts: arrays.Parts, content: dict[str, Any]) -> None:
        parts = arrays.as_arrays(parts)
        arrays.check_finite(parts)
        digests.check_json(content, final)
        self.final = final
        self._unfinished = final.parent / f'{final.name}.writing' if files.is_local(final) else final
        self._content = content | {'leaves': arrays.describe(parts), 'versions': versions()}
        self._operation = f'checkpoint_{next(_operations)}'
        if jax.process_index() == 0:
            self._unfinished.mkdir(parents=True)
        try:
            self._response = arrays.start_writing(self._unfinished / digests.ARRAYS, parts)
        except BaseException:
            if jax.process_index() == 0:
                remove_unfinished(self._unfinished)
            raise

    def finish(self, then: Callable[[], None] | None = None) -> None:
        """Waits until all is on disk and visible under its final name, and process 0 has done `then`.

        Raises whatever went wrong. What was written till then is removed, since a full disk needs the room; what can't
        be removed stays under its unfinished name.
        """
        try:
            self._publish()
        except BaseException:
            if jax.process_index() == 0:
                remove_unfinished(self._unfinished)
            raise
        if jax.process_index() == 0 and then is not None:
            then()
        self._wait_for_all('done')

    def _publish(self) -> None:
        self._response.result()
        index, count = jax.process_index(), jax.process_count()
        share = digests.digest_folder(self._unfinished, (index, count))
        if count > 1:
            share = self._gather(share, index, count)
        if index == 0:
            digests.write_manifest(self._unfinished, self._content | {'files': share})
            files.sync_to_disk(self._unfinished)
            files.publish(self._unfinished, self.final)

    def _gather(self, share: dict[str, Any], index: int, count: int) -> dict[str, Any]:
        """Each process leaves its digests in a file beside the folder; process 0 collects them."""
        names = [self.final.parent / f'{self.final.name}.digests_{i}' for i in range(count)]
        files.write_json(names[index], share)
        self._wait_for_all('digests')
        if index != 0:
            return share
        for name in names:
            share |= json.loads(name.read_text())
            name.unlink()
        return share

    def _wait_for_all(self, moment: str) -> None:
        if jax.process_count() > 1:
            from orbax.checkpoint import v1 as orbax

            asyncio.run(orbax.multihost.sync_global_processes(moment, operation_id=self._operation))


def explain(error: BaseException) -> str:
    """Why a write failed, in one line: the system's own words where it was the system that refused."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if found := re.search(r"os_error_code='(\d+)'", str(error)):  # as tensorstore, which writes for Orbax, puts it
        return os.strerror(int(found[1]))
    return f'{type(error).__name__}: {str(error).partition(chr(10))[0]}'


def remove_unfinished(folder: epath.Path) -> None:
    """Removes what a failed write left, as far as it can be removed."""
    with contextlib.suppress(OSError):
        folder.rmtree()


def copy_part(source: epath.Path, part: str, final: epath.Path, content: dict[str, Any]) -> None:
    """Makes a folder that holds one part of a finished checkpoint, by copying its files; called in one process."""
    unfinished = final.parent / f'{final.name}.writing' if files.is_local(final) else final
    try:
        _copy(source, part, unfinished, content)
    except BaseException:
        remove_unfinished(unfinished)
        raise
    files.publish(unfinished, final)


def _copy(source: epath.Path, part: str, unfinished: epath.Path, content: dict[str, Any]) -> None:
    manifest = digests.read_manifest(source)
    for name in manifest['files']:
        if not digests.belongs(name, part):
            continue
        target = unfinished / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (source / name).copy(target)
        files.sync_to_disk(target)
    leaves = {part: manifest['leaves'][part]}
    copied = {'leaves': leaves, 'versions': manifest['versions'], 'files': digests.digest_folder(unfinished)}
    digests.write_manifest(unfinished, content | copied)
    files.sync_to_disk(unfinished)
