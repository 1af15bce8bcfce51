"""Labels for speech nobody has transcribed: what two models agree on."""
