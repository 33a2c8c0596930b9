"""One copy of the resident images for all worker processes of this machine.

The bytes live in an anonymous memory file (Linux memfd): nothing is left on disk or in /dev/shm
however the processes end, and container limits on /dev/shm do not apply. Sets with a table of their
own (engine.data.table) are in one copy already.
"""

import dataclasses
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.data.table import opened
from engine.plan import StudyData
from engine.study import Data


@dataclass(frozen=True, kw_only=True)
class SharedImages:
    """Where another process of the same user finds the images."""

    path: str
    shape: tuple[int, ...]


class SharedStudyData:
    """Owns the memory file; `light` is the study data without images, `where` finds them."""

    where: SharedImages | None = None

    def __init__(self, data: StudyData) -> None:
        self.light = data.without_images()
        if data.table is not None:
            return
        images = np.ascontiguousarray(data.images_RHWC)
        self._descriptor = os.memfd_create("shadow-engine-images")
        os.truncate(self._descriptor, images.nbytes)
        with mmap.mmap(self._descriptor, images.nbytes) as memory:
            np.frombuffer(memory, np.uint8)[:] = images.reshape(-1)
        self.where = SharedImages(
            path=f"/proc/{os.getpid()}/fd/{self._descriptor}", shape=images.shape
        )

    def close(self) -> None:
        """Give the memory back (workers that mapped it keep it until they end)."""
        if self.where is not None:
            os.close(self._descriptor)


def attach(light: StudyData, where: SharedImages | None, source: Data) -> StudyData:
    """The study data with its images mapped copy-on-write: writing changes no other process."""
    if where is None:
        assert light.table is not None
        return dataclasses.replace(light, images_RHWC=opened(light.table, source))
    count = int(np.prod(where.shape))
    with open(where.path, "rb") as stream:
        memory = mmap.mmap(stream.fileno(), count, access=mmap.ACCESS_COPY)
    images: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(where.shape)
    return dataclasses.replace(light, images_RHWC=images)
