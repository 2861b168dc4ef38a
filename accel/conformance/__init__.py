"""What a backend must do, as a suite that its vendor runs: ``python -m accel conformance --accelerator NAME``."""
