"""The health of GPUs: readings of NVML or dcgm-exporter behind one seam, and what they mean. No GPU is fine too."""
