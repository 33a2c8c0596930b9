"""Images: reading and checking them, the FFCV file they travel through, batches on the device."""
