"""Nothing happens at import: accelrl loads ``backend`` when this vendor is selected or probed."""
