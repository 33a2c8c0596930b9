"""One copy of the resident images for all worker processes of this machine.

The bytes live in an anonymous memory file (Linux memfd): nothing is left on disk or in /dev/shm
however the processes end, and container limits on /dev/shm do not apply.
"""

import dataclasses
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.plan import StudyData


@dataclass(frozen=True, kw_only=True)
class SharedImages:
    """Where another process of the same user finds the images."""

    path: str
    shape: tuple[int, ...]


class SharedStudyData:
    """Owns the memory file; `light` is the study data without images, `where` finds them."""

    def __init__(self, data: StudyData) -> None:
        images = np.ascontiguousarray(data.images_RHWC)
        self._descriptor = os.memfd_create("shadow-engine-images")
        os.truncate(self._descriptor, images.nbytes)
        with mmap.mmap(self._descriptor, images.nbytes) as memory:
            np.frombuffer(memory, np.uint8)[:] = images.reshape(-1)
        self.where = SharedImages(
            path=f"/proc/{os.getpid()}/fd/{self._descriptor}", shape=images.shape
        )
        self.light = dataclasses.replace(data, images_RHWC=images[:0])

    def close(self) -> None:
        """Give the memory back (workers that mapped it keep it until they end)."""
        os.close(self._descriptor)


def attach(light: StudyData, where: SharedImages) -> StudyData:
    """The study data with its images mapped copy-on-write: writing changes no other process."""
    count = int(np.prod(where.shape))
    with open(where.path, "rb") as stream:
        memory = mmap.mmap(stream.fileno(), count, access=mmap.ACCESS_COPY)
    images: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(where.shape)
    return dataclasses.replace(light, images_RHWC=images)
