"""One file a vendor: the only places that name one."""
