"""Philox4x32-10 against Random123's published known answers, and the noise made from it."""

import numpy as np
import pytest

from common.engine.philox import gumbel, philox4x32

# Counter, key, answer: the philox4x32 10 lines of Random123's kat_vectors.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    arrays = tuple(np.array([word], np.uint64) for word in words(counter))
    first, second = words(key)
    assert philox4x32(arrays, (first, second))[0].tolist() == words(answer)


def test_vectors_equal_single_counters():
    counters = [np.arange(50, dtype=np.uint64), *(np.full(50, word, np.uint64) for word in (7, 3, 0))]
    together = philox4x32(tuple(counters), (1, 2))
    for index in (0, 17, 49):
        alone = philox4x32(tuple(column[index : index + 1] for column in counters), (1, 2))
        assert (together[index] == alone[0]).all()


@pytest.mark.parametrize("size", [1, 5, 100, 399, 401])
def test_a_tokens_noise_does_not_depend_on_the_others(size):
    vocab = 401
    everything = gumbel(2**63 + 5, 1, 9, None, vocab)
    assert everything.shape == (vocab,)
    some = np.sort(np.random.default_rng(0).permutation(vocab)[:size])
    assert (gumbel(2**63 + 5, 1, 9, some, vocab) == everything[some]).all()


def test_every_part_of_the_identity_matters():
    base = gumbel(1, 0, 0, None, 64)
    for seed, choice, position in [(2, 0, 0), (1 + 2**32, 0, 0), (1, 1, 0), (1, 0, 1)]:
        assert (gumbel(seed, choice, position, None, 64) != base).all()


def test_it_is_gumbel_noise():
    noise = np.concatenate([gumbel(3, 0, position, None, 4096) for position in range(16)])
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.05)
