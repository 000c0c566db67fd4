"""The kinds of datasets that people bring, as rows by index or as a stream.

    rows by index   a list of dicts, datasets.Dataset, a map-style torch Dataset, a pandas DataFrame
    a stream        datasets.IterableDataset, a torch IterableDataset, a generator, or the function that makes one
    refused         a dataset of several splits, the name of a dataset, a dict of columns, with what to pass instead

Other libraries' classes are known by the names of their modules, so that none of them is imported.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowmem_grpo.data.prompts import DataError, check_dataset
from lowmem_grpo.data.stream import Stream


def rows_of(dataset: Any, parameter: str = "train_dataset") -> Any:
    """The dataset as rows by index, or as a Stream; DataError, with what to pass instead, where it is neither."""
    if dataset is None:
        raise DataError(f"{parameter} is missing, so there are no rows; pass a list of dicts, or a datasets.Dataset")
    if isinstance(dataset, str):
        raise DataError(f"{parameter} is {dataset!r}, which is text; pass datasets.load_dataset({dataset!r}, "
                        "split='train')")
    if comes_from(dataset, "pandas", "DataFrame"):
        return [dict(zip(dataset.columns, row, strict=True)) for row in dataset.itertuples(index=False, name=None)]
    if isinstance(dataset, Mapping):
        raise DataError(f"{parameter} is a {type(dataset).__name__}{of_several(dataset, parameter)}")
    if isinstance(dataset, (list, tuple)) and dataset and not isinstance(dataset[0], Mapping):
        raise DataError(f"{parameter} is a list of {type(dataset[0]).__name__}; each row must be a dict of columns, "
                        "for example {'prompt': 'What is 2 + 2?', 'answer': '4'}")
    if comes_from(dataset, "datasets", "IterableDataset") or comes_from(dataset, "torch", "IterableDataset"):
        return Stream(dataset)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return dataset
    if isinstance(dataset, Iterable) or callable(dataset):
        return Stream(dataset)
    check_dataset(dataset)
    return dataset


def comes_from(value: Any, library: str, name: str) -> bool:
    """Whether it is of a library's class of this name, or of a subclass."""
    return any(cls.__name__ == name and cls.__module__.partition(".")[0] == library for cls in type(value).__mro__)


def of_several(dataset: Mapping[str, Any], parameter: str) -> str:
    """What a mapping holds, and what to pass instead."""
    names = list(dataset)
    if any(isinstance(value, Sequence) and not hasattr(value, "column_names") for value in dataset.values()):
        return (f" with the columns {', '.join(map(repr, names))}; pass datasets.Dataset.from_dict(...) of it, or "
                "a list of rows")
    wanted = "train" if parameter == "train_dataset" else "test"
    split = next((name for name in (wanted, *names) if name in names), "train")
    return f" with the splits {', '.join(map(repr, names)) or '(none)'}; pass one of them: dataset[{split!r}]"


def columns_of(dataset: Any) -> list[str]:
    """The names of the columns; those of the first row where the dataset does not say."""
    named = getattr(dataset, "column_names", None)
    if named is not None:
        return list(named)
    return list(dataset[0]) if len(dataset) else []
