"""A cache daemon for each node: LMCache's `sagemaker-hyperpod` protocol over HTTP and POSIX shared memory."""
