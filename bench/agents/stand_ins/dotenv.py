"""In place of python-dotenv: there is no file of secrets."""

from typing import Any


def load_dotenv(*args: Any, **options: Any) -> bool:
    return False
