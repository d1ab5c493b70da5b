"""Copies of a model's weights that follow a trainer, by the differences of two versions."""

from .._exports import show_exports

__all__: list[str] = []
show_exports(globals())
