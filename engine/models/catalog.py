"""Which networks and norms exist, without importing torch (studies are checked before that)."""

NETS: dict[str, tuple[str, ...]] = {
    "lenet": ("batch", "none", "group", "affine"),
    "conv4": ("batch", "none", "group", "affine"),
    "resnet8": ("batch", "fixup", "group"),
    "resnet20": ("batch", "fixup", "group"),
    "resnet18": ("batch", "fixup", "group"),
    "resnet9": ("batch", "fixup", "group"),
    "densenet": ("batch", "none", "group"),
}
"""Network name -> the norms with which it is known to train.

Residual nets have no plain `none`: without a norm they are trained the Fixup way.
"""
