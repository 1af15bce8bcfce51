"""AF_XDP: the driver that takes packets past the kernel's stack, its XDP program with source and builder, and what a
host must allow."""
