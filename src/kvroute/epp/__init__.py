"""The endpoint picker: Envoy relays the tokens, and the gateway's data plane decides."""
