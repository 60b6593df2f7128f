"""The mesh under faults, every answer known beforehand: `make chaos MINUTES=20`."""
