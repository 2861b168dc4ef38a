"""Which process gets which device: what to ask of Ray, and who holds which card."""
