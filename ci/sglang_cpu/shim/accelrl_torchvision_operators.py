"""Lets torchvision be imported where its compiled operators cannot be loaded (its wheel is linked to CUDA).

Imported by ``accelrl_torchvision_operators.pth`` when Python starts. Just before torchvision is imported, the two
operators are declared that its Python code registers shapes for. They have no implementation: calling one fails, and
text models never do.
"""

import sys
from importlib.abc import MetaPathFinder

OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareOperators(MetaPathFinder):
    """Finds nothing itself; acts when torchvision is looked for."""

    library = None  # the declarations end with this object

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002 - the protocol of finders
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            type(self).library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in OPERATORS:
                self.library.define(operator + SIGNATURE)


sys.meta_path.insert(0, DeclareOperators())
