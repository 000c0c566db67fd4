"""A mean that knows how many values it is of, so that several of them can be put together."""


class MeanOf(float):
    """The mean of `count` values, for `log_metric`: a number like any other, for TRL too.

    A plain number counts as a mean over all completions of its call. A share of some of them alone says how many these
    are, so that a batch scored in several calls logs what a single call would. Raises ValueError for a count that is
    not positive.
    """

    count: float

    def __new__(cls, value: float, count: float) -> "MeanOf":
        if not count > 0:
            raise ValueError(f"a mean of {count} values cannot be; log nothing where there is none")
        mean = super().__new__(cls, value)
        mean.count = count
        return mean
