"""SIP (RFC 3261) without input and output: messages, transactions, dialogs, digest, registration, a user agent."""
