"""Code generated from proto/ by scripts/generate-proto; do not edit."""
