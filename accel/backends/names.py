"""The names of vendors that the rest of ``accel`` has to know: of the built-in backends, and what others hard-code."""

IN_TREE = {
    "cpu": "accel.backends.cpu:CpuAccelerator",
    "cuda": "accel.backends.cuda:cuda_accelerator",
    "musa": "accel.backends.musa:musa_accelerator",
}
ANY_DEVICE = "cuda"  # what code that knows one vendor calls the device…
ANY_BACKEND = "nccl"  # …and its collectives
