"""The bytes of a shard file, in the safetensors format, without a copy of what it holds.

The safetensors library writes whole arrays only: the models of a stack would have to be stacked
first, and its `save` copies twice more.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
METADATA = "__metadata__"
KINDS = {
    np.dtype(kind).newbyteorder("<"): name
    for kind, name in (
        ("u8", "U64"),
        ("i8", "I64"),
        ("f8", "F64"),
        ("f4", "F32"),
        ("u4", "U32"),
        ("i4", "I32"),
        ("f2", "F16"),
        ("u2", "U16"),
        ("i2", "I16"),
        ("i1", "I8"),
        ("u1", "U8"),
        ("?", "BOOL"),
    )
}
"""The format's names, in the order in which the library writes arrays: large items first."""


def blocks(members: Sequence[Mapping[str, Array]], metadata: Mapping[str, str]) -> Iterator[Array]:
    """The contiguous arrays that make up a file of `members`, stacked along a new first axis.

    Raises:
        ValueError: members differ in names, dtypes or shapes, or a dtype is not of the format.
    """
    layout = _layout(members[0])
    if any(_layout(member) != layout for member in members):
        raise ValueError("the models of a shard have arrays of different names, dtypes or shapes")
    order = list(KINDS.values())
    names = sorted(layout, key=lambda name: (order.index(layout[name][0]), name))
    head: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name in names:
        kind, shape = layout[name]
        start, end = end, end + len(members) * members[0][name].nbytes
        head[name] = {
            "dtype": kind,
            "shape": [len(members), *shape],
            "data_offsets": [start, end],
        }
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    for name in names:
        for member in members:
            values = member[name]
            yield np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


def _layout(member: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for name, values in member.items():
        kind = KINDS.get(values.dtype.newbyteorder("<"))
        if kind is None or name == METADATA:
            raise ValueError(f"array '{name}' of {values.dtype} cannot be stored")
        found[name] = (kind, values.shape)
    return found
