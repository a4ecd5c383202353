"""`kvroute doctor`: gathers what the parts of a deployment show, and judges it."""
