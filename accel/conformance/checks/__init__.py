"""The checks, one file a subject. Run through ``accel.conformance.runner``, which hands them the live backend."""
