"""Which form of a convolution's per-sample gradient norm is cheaper, by counting products.

gram    Σ_{t,u} ⟨a_t, a_u⟩⟨b_t, b_u⟩: T(T + 1)/2 pairs of positions, d + O products a pair
square  |Σ_t b_t a_tᵀ|²: d·O sums of T products, squared on the way

T output positions, d = C·k² inputs a position sees, O outputs. Sizes count in whole tiles.
"""

from dataclasses import dataclass
from typing import Literal

Form = Literal["gram", "square"]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Relative cost of one product in each form; `fit` gets it from measured times."""

    gram: float = 1.0
    square: float = 1.0

    def choose(self, positions: int, inputs: int, outputs: int) -> Form:
        """The cheaper form of a layer.

        >>> Cost().choose(positions=16 * 16, inputs=128 * 9, outputs=128)
        'square'
        >>> Cost().choose(positions=8 * 8, inputs=128 * 9, outputs=128)
        'gram'
        """
        gram, square = products(positions, inputs, outputs)
        return "gram" if self.gram * gram < self.square * square else "square"


COST = Cost()
"""What chooses the form on a GPU. bench/gpu_check.py prints the refitted one: put it here."""


def products(positions: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Products of the gram and of the square form, a sample.

    >>> products(16, 9 * 16, 16)
    (21760.0, 36864.0)
    """
    t, d, o = (16 * -(-n // 16) for n in (positions, inputs, outputs))
    return t * (t + 1) / 2 * (d + o), float(t * d * o)


def fit(rows: list[tuple[tuple[int, int, int], float, float]]) -> Cost:
    """The cost from measured (layer sizes, seconds of gram, seconds of square): medians of ratios.

    >>> sizes = (64, 1152, 128)
    >>> cost = fit([(sizes, 2.0 * products(*sizes)[0], 3.0 * products(*sizes)[1])])
    >>> round(cost.square / cost.gram, 6)
    1.5
    """
    if not rows:
        raise ValueError("fit got no measured rows: run bench/gpu_check.py on a GPU first")
    gram = sorted(g / products(*sizes)[0] for sizes, g, _ in rows)
    square = sorted(s / products(*sizes)[1] for sizes, _, s in rows)
    return Cost(gram=gram[len(gram) // 2], square=square[len(square) // 2])
