"""Files and batches of OpenAI: routes, a durable queue, the work of a line, notices of ends."""
