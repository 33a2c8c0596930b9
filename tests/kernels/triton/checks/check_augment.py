"""Augmentation's Triton kernel, interpreted: bit-equal to the Python reference."""

import pytest
import torch
from triton_case import Tracer, kernels, noise, served

from kernels import _register
from kernels.augment import reference

MEAN, STD = [0.49, 0.48, 0.44], [0.2, 0.21, 0.26]
CASES = {
    "plain": (8, 6, 3, {}),
    "crop": (9, 7, 3, {"pad": 2}),
    "flip": (6, 5, 1, {"flip": True}),
    "cutout": (11, 13, 3, {"cutout": 5}),
    "all": (12, 9, 3, {"pad": 4, "flip": True, "cutout": 4}),
    "strips": (40, 32, 3, {"pad": 4, "flip": True, "cutout": 9}),
    "one pixel": (1, 1, 3, {"flip": True, "cutout": 1}),
}


def case(height, width, channels, models=3, batch=5):
    images = (noise(17, height, width, channels, seed=1).abs() * 100).clamp(0, 255).to(torch.uint8)
    index = torch.arange(models * batch).reshape(models, batch) * 5 % 17
    sample = index * 1_000_003 % 2**31
    key = torch.tensor([3, 2**62 + 12345, 2**40 + 7, 11, 2**33 + 1])[:models]
    return images, index, sample, key, MEAN[:channels], STD[:channels]


def by_reference(*inputs, **options):
    """The same batch through the plain torch reference."""
    chosen, _register._fast = _register._fast, lambda *_: None
    _register.forget()
    try:
        return kernels.augment(*inputs, **options)
    finally:
        _register._fast = chosen
        _register.forget()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_batches_equal_the_reference_bit_for_bit(name, dtype):
    assert served("augment")
    *shape, options = CASES[name]
    inputs = case(*shape, models=5 if name == "all" else 3)
    with Tracer():
        batch = kernels.augment(*inputs, **options, dtype=dtype)
    assert torch.equal(batch, by_reference(*inputs, **options, dtype=dtype))


def test_the_words_differ_by_key_and_sample_and_equal_philox_in_python():
    """Salmon et al. 2011, the counter-based generator: known answers of their test vectors."""
    word = reference.philox(torch.tensor(0), torch.tensor([0]))
    assert [int(w) for w in word] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    images, index, sample, key, mean, std = case(12, 9, 3)
    options = {"pad": 4, "flip": True}
    batch = kernels.augment(images, index, sample, key, mean, std, **options)
    other = kernels.augment(images, index, sample, key + 1, mean, std, **options)
    assert not torch.equal(batch, other)


def test_a_model_is_the_same_alone_and_in_any_order():
    *shape, options = CASES["all"]
    images, index, sample, key, mean, std = case(*shape)
    expected = kernels.augment(images, index, sample, key, mean, std, **options)
    for turn in [{"order": i} for i in range(5)] + [{"interleave": i} for i in range(3)]:
        with Tracer(**turn):
            found = kernels.augment(images, index, sample, key, mean, std, **options)
        assert torch.equal(found, expected)
    alone = kernels.augment(images, index[1:2], sample[1:2], key[1:2], mean, std, **options)
    assert torch.equal(alone[0], expected[1])


def test_bytes_moved_are_exactly_those_of_the_formula():
    """Each pixel is read and written once; the table once for each value a program meets."""
    *shape, options = CASES["flip"]
    images, index, sample, key, mean, std = case(*shape)
    with Tracer() as trace:
        batch = kernels.augment(images, index, sample, key, mean, std, **options)
    launch = trace.launches[0]
    programs = index.numel()
    assert launch.stored == {"out_ptr": batch.numel() * 4}
    assert launch.loaded["images_ptr"] == batch.numel()
    words = [launch.loaded[name] for name in ("index_ptr", "sample_ptr", "key_ptr")]
    assert words == [programs * 8] * 3
    values = sum(len(images[i, :, :, 0].unique()) for i in index.flatten())
    assert launch.loaded["table_ptr"] == values * 4


def test_strided_indices_and_an_empty_batch_are_accepted():
    images, index, sample, key, mean, std = case(6, 5, 1)
    expected = kernels.augment(images, index, sample, key, mean, std, flip=True)
    turned = index.T.contiguous().T
    assert torch.equal(kernels.augment(images, turned, sample, key, mean, std, flip=True), expected)
    none = kernels.augment(images, index[:, :0], sample[:, :0], key, mean, std)
    assert none.shape == (3, 0, 1, 6, 5)
