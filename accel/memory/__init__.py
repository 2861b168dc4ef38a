"""Device memory that is given away and taken back while a process lives."""
