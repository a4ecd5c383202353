"""The queue of requests that wait for a worker with a permit."""
