"""The cell table without tensors: K and V lie in numpy, a cell's index is their row.

python cells_alone.py
"""

import numpy as np

from cellkv import Cache

N_ROWS, WIDTH = 64, 16

rng = np.random.default_rng(0)
queries, keys, values = rng.standard_normal((3, 100, WIDTH))  # of each of 100 tokens
k_rows, v_rows = np.zeros((2, N_ROWS, WIDTH))


def attend(cache: Cache, tokens: list[int], seqs: list[int]) -> np.ndarray:
    """Run a step of attention: token i attends its sequence's rows up to its own position."""
    cache.declare(seqs)
    rows = cache.place()
    k_rows[rows], v_rows[rows] = keys[tokens], values[tokens]
    results = []
    for token, row, seq in zip(tokens, rows, seqs, strict=True):
        seen = cache.cells(seq).cells
        seen = seen[: np.flatnonzero(seen == row)[0] + 1]
        scores = np.exp(k_rows[seen] @ queries[token] / WIDTH**0.5)
        results.append(scores @ v_rows[seen] / scores.sum())
    return np.array(results)


with Cache(backend="cells", capacity=N_ROWS) as cache:
    first = cache.open()
    attend(cache, [3, 1, 4, 1, 5], [first] * 5)
    second = cache.clone(first, upto=3)  # shares the rows of 3, 1, 4
    together = attend(cache, [9, 2], [first, second])

    alone = cache.open()  # the same tokens as in second, in rows of its own
    apart = attend(cache, [3, 1, 4, 2], [alone] * 4)
    print("the same attention:", np.allclose(together[1], apart[-1]))
    print(cache.stats.used_cells, "rows in use,", cache.stats.owned_cells, "owned")
