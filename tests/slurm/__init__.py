"""Jobs on a real SLURM; needs Debian's slurm-wlm, munge and shellcheck, and root. Run by `make test-slurm`."""
