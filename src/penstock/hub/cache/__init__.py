"""The weights cache: models on local disk, fetched once for all processes, checked, bounded by size, the least recently
used removed first. It knows no place that models come from: those are sources."""
