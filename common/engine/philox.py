"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A pure function of key and counter: no state that batching, chunking or a hand-off could disturb.
"""

import numpy as np

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], key: tuple[int, int]) -> np.ndarray:
    """Four random words for every counter.

    counter: four uint64 arrays [n] (or broadcastable) of 32-bit words; key: two 32-bit words. Returns uint32 [n, 4].
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def gumbel(seed: int, choice: int, position: int, token_ids: np.ndarray | None, vocab_size: int) -> np.ndarray:
    """Standard Gumbel noise, float64, for token ids [n], or for [0, vocab_size) when None.

    A token's noise depends on (seed, choice, position, token id) alone, whichever others are asked for.
    """
    key = seed & 0xFFFFFFFF, seed >> 32
    if token_ids is None or 4 * len(token_ids) >= vocab_size:
        # One counter yields the words of four neighbouring ids.
        groups = np.arange(-(-vocab_size // 4), dtype=np.uint64)
        words = philox4x32((groups, *_words(position, choice)), key).reshape(-1)[:vocab_size]
        if token_ids is not None:
            words = words[token_ids]
    else:
        ids = token_ids.astype(np.uint64)
        lanes = philox4x32((ids // np.uint64(4), *_words(position, choice)), key)
        words = lanes[np.arange(len(ids)), token_ids % 4]
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32  # in (0, 1), never an end
    return np.asarray(-np.log(-np.log(uniform)))


def _words(*values: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first, second = (np.asarray([value], dtype=np.uint64) for value in values)
    return first, second, np.zeros(1, dtype=np.uint64)
