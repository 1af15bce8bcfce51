"""Web console: browser pages for using the server, built from console/ and served from here."""
