"""Host memory that the device can address."""
