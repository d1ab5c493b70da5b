"""Copies of a model's weights that follow a trainer, by the differences of two versions."""

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._follower import Follower
from ._publisher import Publisher

__all__ = ["Follower", "Publisher"]

set_module_of_exports(globals())
show_exports(globals())
