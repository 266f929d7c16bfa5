"""Launch configurations that are measured once and kept."""
