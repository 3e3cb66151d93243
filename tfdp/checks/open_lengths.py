"""Lengths of axes that are open, as sums of products of unknowns."""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

# Unknowns that are multiplied, ascending; none for a plain number.
_Product: TypeAlias = tuple[int, ...]

# One number for each unknown, the same wherever it comes from again.
_unknowns: dict[Hashable, int] = {}
_numbers = itertools.count()
# Those that are never below 0, as axes have them: of arguments, of what windows and slices
# leave, and of what is broadcast.
_OF_AXES = ("given", "window", "part", "longest", "range")
_lengths: set[int] = set()
# How often one may be taken: what is longer than 2^31 overflows.
_LARGEST_TIMES = 2**15
_other_lengths: set["Open"] = set()


class Open:
    """A length that is made of open ones: a sum of products of unknowns.

    Two are equal if they are so for all lengths, so what is proven for them is proven for
    whatever data has. Where sums, products and divisions without a remainder do not say what a
    length is, it is an unknown of its own: such as what a window leaves of another.

    It has no order, and is no index: what would have to know how long it is raises `TypeError`.

    Attributes:
        terms: How often each product comes in the sum.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[_Product, int]) -> None:
        """Make a sum of products, each as often as is said; see `unknown`."""
        self.terms: Mapping[_Product, int] = dict(terms)

    @classmethod
    def unknown(cls, *what: Hashable) -> "Open":
        """Return a length of which is only known what makes it.

        Args:
            *what: The same for what is always equally long.
        """
        number = _unknowns.setdefault(what, next(_numbers))
        is_divided = what[0] in ("//", "%") and all(map(_is_plain, what[1:3]))
        if what[0] in _OF_AXES or is_divided:
            _lengths.add(number)
        return cls({(number,): 1})

    @property
    def is_length(self) -> bool:
        """Whether it is a sum of lengths, and so never below 0."""
        numbers = {number for product in self.terms for number in product}
        is_sum = numbers <= _lengths and min(self.terms.values()) > 0
        return is_sum or self in _other_lengths

    def as_length(self) -> "Open":
        """Return it, of which is known that it never is below 0."""
        _other_lengths.add(self)
        return self

    @property
    def is_small(self) -> bool:
        """Whether it does not overflow where tensors of such lengths are in memory."""
        degree = max(map(len, self.terms))
        is_of_axes = degree < 3 or (degree == 3 and len(self.terms) == 1)
        return is_of_axes and max(map(abs, self.terms.values())) < _LARGEST_TIMES

    @property
    def is_one(self) -> bool:
        """Whether it is the length of an axis, and nothing more is made of it."""
        return self.is_length and [*map(len, self.terms), *self.terms.values()] == [
            1,
            1,
        ]

    def __eq__(self, other: object) -> bool:
        """Tell whether both are equal whatever the open lengths are."""
        return isinstance(other, Open) and self.terms == other.terms

    def __hash__(self) -> int:
        """Hash by what is added up."""
        return hash(frozenset(self.terms.items()))

    def __repr__(self) -> str:
        """Show the sum."""
        products = (
            "*".join([str(times), *(f"L{number}" for number in product)])
            for product, times in self.terms.items()
        )
        return "+".join(products)

    def __add__(self, other: object) -> "Open | int":
        """Add."""
        terms = _terms_of(other)
        return NotImplemented if terms is None else _sum(self.terms, terms, 1)

    __radd__ = __add__

    def __sub__(self, other: object) -> "Open | int":
        """Subtract."""
        terms = _terms_of(other)
        return NotImplemented if terms is None else _sum(self.terms, terms, -1)

    def __rsub__(self, other: object) -> "Open | int":
        """Subtract from a number."""
        terms = _terms_of(other)
        return NotImplemented if terms is None else _sum(terms, self.terms, -1)

    def __neg__(self) -> "Open | int":
        """Negate."""
        return _sum({}, self.terms, -1)

    def __mul__(self, other: object) -> "Open | int":
        """Multiply."""
        terms = _terms_of(other)
        if terms is None:
            return NotImplemented
        found: Counter[_Product] = Counter()
        for first, times in self.terms.items():
            for second, more in terms.items():
                found[tuple(sorted(first + second))] += times * more
        return _simplest(found)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> Any:
        """Divide; by what does not divide it for all lengths, to an unknown."""
        return _divided(self, other)

    def __rfloordiv__(self, other: object) -> Any:
        """Divide a number."""
        return _divided(other, self)

    def __mod__(self, other: object) -> Any:
        """Return what is left of a division: 0, or an unknown."""
        return _rest(self, other)

    def __rmod__(self, other: object) -> Any:
        """Return what is left of a number."""
        return _rest(other, self)


def may_be_negative(length: object) -> bool:
    """Tell whether an open length may be -1, which in shapes stands for what is left."""
    return isinstance(length, Open) and not length.is_length


def _is_plain(value: object) -> bool:
    """Tell whether it is positive, or a sum of lengths."""
    if isinstance(value, Open):
        return value.is_length and max(map(len, value.terms)) < 2
    return isinstance(value, int) and value > 0


def _terms_of(value: object) -> Mapping[_Product, int] | None:
    """Return a number as a sum of products; None for what is none."""
    if isinstance(value, Open):
        return value.terms
    return {(): int(value)} if isinstance(value, int) else None


def _sum(
    first: Mapping[_Product, int], second: Mapping[_Product, int], sign: int
) -> Open | int:
    found = Counter(first)
    for product, times in second.items():
        found[product] += sign * times
    return _simplest(found)


def _simplest(terms: Mapping[_Product, int]) -> Open | int:
    """Return a sum without what comes no time, as a plain number if it is one."""
    left = {product: times for product, times in terms.items() if times}
    return left.get((), 0) if left.keys() <= {()} else Open(left)


def _divided(first: object, second: object) -> Any:
    terms, divisor = _terms_of(first), _terms_of(second)
    if terms is None or divisor is None:
        return NotImplemented
    quotient = _quotient(terms, divisor)
    return Open.unknown("//", first, second) if quotient is None else quotient


def _rest(first: object, second: object) -> Any:
    terms, divisor = _terms_of(first), _terms_of(second)
    if terms is None or divisor is None:
        return NotImplemented
    if _quotient(terms, divisor) is not None:
        return 0
    return Open.unknown("%", first, second)


def _quotient(
    terms: Mapping[_Product, int], divisor: Mapping[_Product, int]
) -> Open | int | None:
    """Divide a sum of products by another; None if that leaves a rest."""
    if not any(divisor.values()):
        raise ZeroDivisionError
    by = max(divisor, key=_order)
    rest = {product: times for product, times in terms.items() if times}
    found: dict[_Product, int] = {}
    while rest:
        first = max(rest, key=_order)
        more = Counter(first)
        more.subtract(by)
        times, left = divmod(rest[first], divisor[by])
        if left or min(more.values(), default=0) < 0:
            return None
        product = tuple(sorted(more.elements()))
        found[product] = times
        taken = Open(divisor) * Open({product: times})
        rest = dict(_terms_of(Open(rest) - taken) or {})
        rest = {product: times for product, times in rest.items() if times}
    return _simplest(found)


def _order(product: _Product) -> tuple[int, _Product]:
    """Order products so that multiplying two by a third keeps their order."""
    return len(product), product
