"""Points libraries that hard-code CUDA at the selected device while they are imported."""

from accel.retarget.hook import install as install
