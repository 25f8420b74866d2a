"""Serves a GGUF file: unpacks what the services read of it into a model directory."""
