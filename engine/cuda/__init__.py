"""The CUDA side: fused kernels, captured steps, and the card as NVML sees it. Imported only on CUDA."""
