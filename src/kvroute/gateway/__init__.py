"""The HTTP edge: the relayed data plane, the control plane, and the errors that the gateway writes itself."""
