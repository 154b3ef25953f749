"""What kind of thing of Lightning's an object is, by the names of its classes.

Names, since two packages define each class, and older ones lack some.
"""

from __future__ import annotations


def is_a(thing: object, *names: str) -> bool:
    """Whether an object is of a class of one of these names, or of a child of one."""
    return any(cls.__name__ in names for cls in type(thing).__mro__)
