"""Where leases live."""
