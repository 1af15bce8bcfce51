"""The web console: pages a browser can talk to the server with, built from console/ and served from here."""
