"""SGD against torch.optim, augmentation against plain Python."""

import numpy as np
import pytest
import torch
from tolerances import FLOAT32_FLOOR, STEPS_FLOAT64, error

import kernels
from kernels.augment import cpu, reference


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("decay", [0.0, 5e-3])
def test_sgd_equals_torch_optim(dtype, momentum, nesterov, decay):
    rates = [0.1, 0.03, 0.2]
    generator = torch.Generator().manual_seed(0)
    sizes = {"weight": (5, 3), "bias": (5,), "scale": ()}
    start = {n: torch.randn((3, *s), generator=generator, dtype=dtype) for n, s in sizes.items()}
    params = {n: t.clone() for n, t in start.items()}
    momenta = {n: torch.zeros_like(t) for n, t in params.items()}
    steps = [
        {n: torch.randn((3, *s), generator=generator, dtype=dtype) for n, s in sizes.items()}
        for _ in range(5)
    ]
    lr, decays = torch.tensor(rates, dtype=dtype), torch.full((3,), decay, dtype=dtype)
    for grads in steps:
        kernels.sgd.step(params, grads, momenta, lr, decays, momentum, nesterov, {"weight"})
    for m, rate in enumerate(rates):
        mine = {n: t[m].clone().requires_grad_() for n, t in start.items()}
        groups = [
            {"params": [mine["weight"]], "weight_decay": decay},
            {"params": [mine["bias"], mine["scale"]], "weight_decay": 0.0},
        ]
        optimiser = torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=nesterov)
        for grads in steps:
            for name, leaf in mine.items():
                leaf.grad = grads[name][m].clone()
            optimiser.step()
        limit = STEPS_FLOAT64 if dtype is torch.float64 else FLOAT32_FLOOR
        for name, leaf in mine.items():
            assert error(params[name][m], leaf) <= limit, name


def test_sgd_in_one_pass_rounds_like_the_reference(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 1237, generator=generator) for _ in range(3)]
    lr, decay = torch.rand(3), torch.rand(3)
    results = []
    for force in ("", "reference"):
        monkeypatch.setenv("SHADOW_KERNELS", force)
        param, grad, buffer = (t.clone() for t in tensors)
        for _ in range(3):
            kernels.sgd.step({"w": param}, {"w": grad}, {"w": buffer}, lr, decay, 0.9, True)
        results.append((param, buffer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_sgd_rounds_the_same_in_the_strides_of_a_convolution_weight(monkeypatch):
    lr, decay = torch.rand(3), torch.rand(3)
    start = [torch.randn(3, 8, 16, 3, 3) for _ in range(3)]
    assert not kernels.laid_out(start[0])[0].is_contiguous()
    forms = [
        (kernels.laid_out, kernels.laid_out, ""),
        (kernels.laid_out, torch.clone, ""),
        (torch.clone, kernels.laid_out, ""),
        (torch.clone, torch.clone, "reference"),
    ]
    results = []
    for of_param, of_grad, force in forms:
        monkeypatch.setenv("SHADOW_KERNELS", force)
        param, buffer, grad = of_param(start[0]), of_param(start[1]), of_grad(start[2])
        given = param.data_ptr()
        for _ in range(2):
            kernels.sgd.step({"w": param}, {"w": grad}, {"w": buffer}, lr, decay, 0.9, True)
        assert param.data_ptr() == given
        results.append((param, buffer))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_sgd_takes_strided_gradients_and_parameters():
    wide = torch.randn(3, 4, 2)
    param, grad = wide[..., 0], torch.randn(4, 3).T
    wanted = param - 0.5 * grad
    kernels.sgd.step({"w": param}, {"w": grad}, {}, torch.full((3,), 0.5), torch.zeros(3), 0.0)
    assert torch.equal(wide[..., 0], wanted)


def test_sgd_refuses_other_names_and_counts():
    w = {"w": torch.ones(2, 3)}
    with pytest.raises(ValueError, match="different parameters"):
        kernels.sgd.step(w, {}, w, torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="2 models"):
        kernels.sgd.step(w, w, {"w": torch.zeros(2, 3)}, torch.ones(3), torch.ones(3))


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as Salmon et al. (2011) write it, in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high_0, low_0 = divmod(0xD2511F53 * c[0], 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_plain_philox_gives_the_published_words():
    """Known answers of the Random123 distribution."""
    assert plain_philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = [0xFFFFFFFF]
    assert plain_philox(full * 4, full * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert plain_philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("key", [0, 1, 2**32 - 1, 2**32, 0x1234567890ABCDEF, 2**63 - 1])
def test_philox_equals_plain_python(key):
    samples = [0, 1, 59_999, 2**31 - 1]
    words = reference.philox(torch.tensor(key), torch.tensor(samples))
    for i, sample in enumerate(samples):
        wanted = plain_philox([sample, 0, 0, 0], [key % 2**32, key >> 32])
        assert [int(w[i]) for w in words] == wanted
        assert list(cpu.philox(np.uint64(key), np.uint64(sample))) == wanted


def plain_augment(image, sample, key, table, pad, flip, cutout):
    """One image in plain Python loops, as kernels.augment documents it."""
    height, width, channels = image.shape
    r = plain_philox([sample, 0, 0, 0], [key % 2**32, key >> 32])
    out = np.zeros((channels, height, width))

    def reflect(position, size):
        position = abs(position)
        return 2 * (size - 1) - position if position >= size else position

    for y in range(height):
        for x in range(width):
            from_x = width - 1 - x if flip and r[2] % 2 else x
            row = reflect(y + r[0] % (2 * pad + 1) - pad, height)
            column = reflect(from_x + r[1] % (2 * pad + 1) - pad, width)
            top, left = (r[2] >> 1) % height - cutout // 2, r[3] % width - cutout // 2
            if top <= y < top + cutout and left <= x < left + cutout:
                continue
            out[:, y, x] = [table[c][image[row, column, c]] for c in range(channels)]
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("pad", "flip", "cutout"), [(0, False, 0), (2, True, 0), (3, True, 4)])
def test_augment_equals_plain_python(dtype, channels, pad, flip, cutout):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (11, 7, 9, channels), generator=generator, dtype=torch.uint8)
    index = torch.randint(11, (3, 5), generator=generator)
    samples = torch.randint(2**31, (3, 5), generator=generator)
    keys = torch.randint(2**62, (3,), generator=generator)
    mean, std = [0.4, 0.5, 0.6][:channels], [0.2, 0.3, 0.25][:channels]
    batch = kernels.augment(
        images, index, samples, keys, mean, std, pad=pad, flip=flip, cutout=cutout, dtype=dtype
    )
    assert batch.shape == (3, 5, channels, 7, 9)
    assert batch.dtype is dtype
    table = (np.arange(256) / 255 - np.array(mean)[:, None]) / np.array(std)[:, None]
    table = torch.from_numpy(table).to(dtype).double().numpy()
    for m in range(3):
        for b in range(5):
            image = images[index[m, b]].numpy()
            args = (int(samples[m, b]), int(keys[m]), table, pad, flip, cutout)
            assert np.array_equal(batch[m, b].double().numpy(), plain_augment(image, *args))


def test_augment_of_a_model_does_not_know_the_stack():
    images = torch.randint(256, (9, 8, 8, 3), dtype=torch.uint8)
    index, keys = torch.randint(9, (4, 7)), torch.arange(4) + 2**40
    given = {"mean_C": [0.5] * 3, "std_C": [0.2] * 3, "pad": 2, "flip": True, "cutout": 3}
    whole = kernels.augment(images, index, index, keys, **given)
    for m in range(4):
        one = kernels.augment(images, index[[m]], index[[m]], keys[[m]], **given)
        assert torch.equal(one[0], whole[m])


def test_offsets_and_flips_are_uniform():
    samples = torch.arange(20_000)
    words = reference.philox(torch.tensor(12345), samples)
    for word, sizes in zip(words, (9, 9, 2, 32), strict=True):
        counts = torch.bincount(word % sizes, minlength=sizes).double()
        expected = len(samples) / sizes
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < sizes - 1 + 5 * (2 * (sizes - 1)) ** 0.5


@pytest.mark.parametrize(("dy", "dx", "flip"), [(0, 0, False), (1, -2, True), (-3, 2, False)])
def test_a_view_is_the_shift_it_names(dy, dx, flip):
    images = torch.randint(256, (4, 7, 9, 3), dtype=torch.uint8)
    index = torch.tensor([3, 0])
    batch = kernels.view(images, index, [0.5] * 3, [0.25] * 3, dy=dy, dx=dx, flip=flip)
    plain = kernels.view(images, index, [0.5] * 3, [0.25] * 3)
    padded = torch.nn.functional.pad(plain.flip(3) if flip else plain, (3, 3, 3, 3), mode="reflect")
    shift = -dx if flip else dx
    assert torch.equal(batch, padded[:, :, 3 + dy : 10 + dy, 3 + shift : 12 + shift])


@pytest.mark.parametrize(
    "change",
    [
        {"images_RHWC": torch.zeros(2, 4, 4, 1)},
        {"index_MB": torch.zeros(2, dtype=torch.int64)},
        {"key_M": torch.zeros(3, dtype=torch.int64)},
        {"pad": 4},
    ],
)
def test_augment_refuses_other_shapes(change):
    good = {
        "images_RHWC": torch.zeros(2, 4, 4, 1, dtype=torch.uint8),
        "index_MB": torch.zeros(2, 3, dtype=torch.int64),
        "sample_MB": torch.zeros(2, 3, dtype=torch.int64),
        "key_M": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match="expected"):
        kernels.augment(**{**good, **change}, mean_C=[0.5], std_C=[0.2])


def test_augment_refuses_an_index_outside():
    images = torch.zeros(2, 4, 4, 1, dtype=torch.uint8)
    index = torch.tensor([[2]])
    with pytest.raises(IndexError):
        kernels.augment(images, index, index, torch.tensor([0]), [0.5], [0.2])
