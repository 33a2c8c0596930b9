"""Shard files have the very bytes that the safetensors library writes of stacked arrays."""

import hashlib
import io

import numpy as np
import pytest
from safetensors.numpy import load, save

from engine import files, shardfile

METADATA = {"identity": '{"models": "[1, 2]", "mix": "clean \u00e9"}'}
SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (5, 2, 3))


def written(members):
    stream = io.BytesIO()
    digest = files.write_hashed(stream, shardfile.blocks(members, METADATA))
    assert digest == hashlib.sha256(stream.getvalue()).hexdigest()
    return stream.getvalue()


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("seed", range(8))
def test_the_bytes_are_those_of_the_library(count, seed):
    rng = np.random.default_rng(seed)
    kinds = rng.permutation([str(kind) for kind in shardfile.KINDS])[: rng.integers(1, 13)]
    shapes = {f"array{i}_N": SHAPES[rng.integers(len(SHAPES))] for i in range(len(kinds))}
    members = [
        {
            name: (100 * rng.random(shape)).astype(kind)
            for kind, (name, shape) in zip(kinds, shapes.items(), strict=True)
        }
        for _ in range(count)
    ]
    stacked = {name: np.stack([member[name] for member in members]) for name in shapes}
    assert written(members) == save(stacked, metadata=METADATA)


def test_arrays_longer_than_a_piece_and_strided_ones_are_written_whole():
    long = np.arange(files.PIECE + 3, dtype=np.int32)
    members = [{"a_N": long[::2], "b_NK": np.arange(12.0).reshape(3, 4).T}] * 2
    found = load(written(members))
    assert (found["a_N"] == np.stack([long[::2]] * 2)).all()
    assert (found["b_NK"] == members[0]["b_NK"]).all()


@pytest.mark.parametrize(
    "other",
    [
        {"a_N": np.zeros(4)},
        {"a_N": np.zeros(3, np.float32)},
        {"b_N": np.zeros(3)},
        {"a_N": np.zeros(3), "b_N": np.zeros(3)},
    ],
)
def test_members_of_another_layout_are_refused(other):
    with pytest.raises(ValueError, match="different names, dtypes or shapes"):
        list(shardfile.blocks([{"a_N": np.zeros(3)}, other], {}))


def test_what_the_format_has_no_name_for_is_refused():
    with pytest.raises(ValueError, match="'a_N' of <U1 cannot be stored"):
        list(shardfile.blocks([{"a_N": np.array(["x"])}], {}))
    with pytest.raises(ValueError, match="'__metadata__' of float64 cannot be stored"):
        list(shardfile.blocks([{shardfile.METADATA: np.zeros(3)}], {}))
