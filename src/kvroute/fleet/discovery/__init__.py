"""Sources of the fleet's workers: static list, file, Kubernetes, DNS."""
