"""An emulated MUSA device in host memory: a real PrivateUse1 device and process-group backend for machines without one.

It is loaded by ``--accelerator musa --emulate`` or ``ACCELRL_EMULATE_MUSA=1`` and by nothing else.
"""
